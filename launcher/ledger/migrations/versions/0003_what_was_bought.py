"""Add the real purchases, price changes of running nodes, and costs beside the instances."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "node_price",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("node_id", WHOLE, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("zone", sa.String(), nullable=False),
        sa.Column("instance_type", sa.String(), nullable=False),
        sa.Column("micro_usd_per_hour", WHOLE, nullable=False),
        sa.Column("price_source", sa.String(), nullable=False),
        sa.Column("price_observed_at", sa.String(), nullable=False),
        sa.CheckConstraint("micro_usd_per_hour >= 0"),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("node_price", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_node_price_node_id"), ["node_id"], unique=False)
    op.create_table(
        "side_cost",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("run_id", WHOLE, nullable=False),
        sa.Column("node_id", WHOLE, nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("amount", sa.String(), nullable=False),
        sa.Column("start_ms", WHOLE, nullable=False),
        sa.Column("end_ms", WHOLE, nullable=False),
        sa.Column("micro_usd", WHOLE, nullable=True),
        sa.Column("source", sa.String(), nullable=False),
        sa.CheckConstraint("micro_usd >= 0"),
        sa.ForeignKeyConstraint(["node_id"], ["node.id"]),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"]),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("side_cost", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_side_cost_run_id"), ["run_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("side_cost", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_side_cost_run_id"))

    op.drop_table("side_cost")
    with op.batch_alter_table("node_price", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_node_price_node_id"))

    op.drop_table("node_price")
