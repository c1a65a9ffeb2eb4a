"""Migrations of the ledger, for alembic. Only `launcher.ledger.store.open_ledger` runs the migrations."""
