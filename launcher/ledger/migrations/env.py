"""Run the migrations on the connection from `open_ledger`. SQLite alters tables in batches (copies)."""

from alembic import context

from launcher.ledger.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
