"""Index the engine's events by run and kind, and keep the views of runs that are over, for ledgers of many runs."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.drop_index("ix_progress_kind", "progress")
    op.create_index("ix_progress_run_id_kind", "progress", ["run_id", "kind"])
    op.create_table(
        "kept_view",
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), primary_key=True),
        sa.Column("mark", sa.String(), nullable=False),
        sa.Column("view", sa.JSON(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("kept_view")
    op.drop_index("ix_progress_run_id_kind", "progress")
    op.create_index("ix_progress_kind", "progress", ["kind"])
