"""The ledger's history, for alembic. `launcher.ledger.store.open_ledger` runs it; nobody else needs to."""
