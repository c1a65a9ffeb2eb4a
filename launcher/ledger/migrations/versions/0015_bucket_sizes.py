"""Keep the sizes of what runs left in their buckets."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "bucket_size",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("at_wall_ms", WHOLE, nullable=False),
        sa.Column("url", sa.String(), nullable=False),
        sa.Column("bytes", WHOLE, nullable=True),
        sa.Column("is_whole", sa.Boolean(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("problem", sa.String(), nullable=False),
        sa.CheckConstraint("bytes >= 0"),
    )
    op.create_index("ix_bucket_size_run_id", "bucket_size", ["run_id"])


def downgrade() -> None:
    op.drop_index("ix_bucket_size_run_id", "bucket_size")
    op.drop_table("bucket_size")
