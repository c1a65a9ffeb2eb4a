"""Add the money that a ledger from a backup does not know."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "spent_mark",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("micro_usd", WHOLE, nullable=False),
        sa.Column("wall_ms", WHOLE, nullable=True),
    )
    op.create_index("ix_spent_mark_run_id", "spent_mark", ["run_id"])


def downgrade() -> None:
    op.drop_index("ix_spent_mark_run_id", "spent_mark")
    op.drop_table("spent_mark")
