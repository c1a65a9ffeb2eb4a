"""Add the errors of a controller's passes: `spotrl status` shows a run that is in trouble."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "trouble",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("wall_ms", WHOLE, nullable=True),
    )
    op.create_index("ix_trouble_run_id", "trouble", ["run_id"])


def downgrade() -> None:
    op.drop_index("ix_trouble_run_id", "trouble")
    op.drop_table("trouble")
