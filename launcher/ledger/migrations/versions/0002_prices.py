"""Add the tables of reported prices, and of the clouds' capacity estimates."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "price_point",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("cloud", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("zone", sa.String(), nullable=False),
        sa.Column("zone_id", sa.String(), nullable=False),
        sa.Column("instance_type", sa.String(), nullable=False),
        sa.Column("market", sa.String(), nullable=False),
        sa.Column("micro_usd_per_hour", WHOLE, nullable=False),
        sa.Column("currency", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("source_id", sa.String(), nullable=False),
        sa.Column("effective_ms", WHOLE, nullable=False),
        sa.Column("observed_ms", WHOLE, nullable=False),
        sa.Column("last_seen_ms", WHOLE, nullable=False),
        sa.CheckConstraint("micro_usd_per_hour > 0"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(
            "zone",
            "region",
            "instance_type",
            "market",
            "source",
            "cloud",
            "effective_ms",
            "micro_usd_per_hour",
            name="one_price",
        ),
    )
    with op.batch_alter_table("price_point", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_price_point_zone_id"), ["zone_id"], unique=False)
    op.create_table(
        "capacity_advice",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("cloud", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("zone", sa.String(), nullable=False),
        sa.Column("instance_type", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("from_ms", WHOLE, nullable=False),
        sa.Column("until_ms", WHOLE, nullable=False),
        sa.Column("observed_ms", WHOLE, nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint(
            "zone", "instance_type", "kind", "from_ms", "until_ms", "value", "cloud", name="one_advice"
        ),
    )


def downgrade() -> None:
    op.drop_table("capacity_advice")
    with op.batch_alter_table("price_point", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_price_point_zone_id"))

    op.drop_table("price_point")
