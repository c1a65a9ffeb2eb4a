"""Add the wall time of statuses, node events and commands: the clock of a local run moves with its work."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TABLES = ("run_status", "node_event", "start_command")


def upgrade() -> None:
    for table in TABLES:
        op.add_column(table, sa.Column("wall_ms", WHOLE, nullable=True))


def downgrade() -> None:
    for table in TABLES:
        op.drop_column(table, "wall_ms")
