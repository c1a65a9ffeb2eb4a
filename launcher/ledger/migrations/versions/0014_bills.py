"""Keep the lines of the clouds' own bills that concern our nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "bill_line",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("identity", sa.String(), nullable=False, unique=True),
        sa.Column("cell", sa.String(), nullable=False),
        sa.Column("cloud", sa.String(), nullable=False),
        sa.Column("payer", sa.String(), nullable=False),
        sa.Column("month", sa.String(), nullable=False),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("node_id", WHOLE, sa.ForeignKey("node.id"), nullable=True),
        sa.Column("resource", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("start_ms", WHOLE, nullable=False),
        sa.Column("end_ms", WHOLE, nullable=False),
        sa.Column("pico_usd", WHOLE, nullable=False),
        sa.Column("hours", sa.Double(), nullable=True),
        sa.Column("copies", WHOLE, nullable=False),
        sa.CheckConstraint("copies >= 1"),
    )
    op.create_index("ix_bill_line_run_id", "bill_line", ["run_id"])
    op.create_index("ix_bill_line_month", "bill_line", ["cloud", "payer", "month"])


def downgrade() -> None:
    op.drop_index("ix_bill_line_month", "bill_line")
    op.drop_index("ix_bill_line_run_id", "bill_line")
    op.drop_table("bill_line")
