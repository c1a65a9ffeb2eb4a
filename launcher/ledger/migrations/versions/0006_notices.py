"""Add the notices that were sent about a run, so that a restarted controller sends each cause once."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "notice",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("text", sa.String(), nullable=False),
        sa.Column("sent_wall_ms", WHOLE, nullable=True),
        sa.Column("failure", sa.String(), nullable=False),
        sa.UniqueConstraint("run_id", "key"),
    )


def downgrade() -> None:
    op.drop_table("notice")
