"""Runs the migrations on the connection that `open_ledger` passes in. SQLite alters tables in batches (copies)."""

from alembic import context

from launcher.ledger.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
