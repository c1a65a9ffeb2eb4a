"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "run",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_ms", WHOLE, nullable=False),
        sa.Column("job_yaml", sa.String(), nullable=False),
        sa.Column("job", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.Column("job_digest", sa.String(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("lock_digest", sa.String(), nullable=False),
        sa.Column("seed", WHOLE, nullable=False),
        sa.Column("infra", sa.String(), nullable=False),
        sa.Column("money_basis", sa.String(), nullable=False),
        sa.Column("clock_origin_ms", WHOLE, nullable=False),
        sa.Column("clock_factor", sa.Double(), nullable=False),
        sa.Column("max_total_micro_usd", WHOLE, nullable=True),
        sa.Column("max_hourly_micro_usd", WHOLE, nullable=True),
        sa.Column("target_metric", sa.String(), nullable=True),
        sa.Column("target_value", sa.Double(), nullable=True),
        sa.Column("folder", sa.String(), nullable=False),
        sa.Column("workdir", sa.String(), nullable=True),
        sa.Column("deadline_ms", WHOLE, nullable=True),
        sa.Column("coordinator_port", WHOLE, nullable=False),
        sa.Column("token", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "controller_lease",
        sa.Column("run_id", WHOLE, nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("pid", WHOLE, nullable=False),
        sa.Column("epoch", WHOLE, nullable=False),
        sa.Column("expires_wall_ms", WHOLE, nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["run.id"],
        ),
        sa.PrimaryKeyConstraint("run_id"),
    )
    op.create_table(
        "node",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("run_id", WHOLE, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("slot", sa.String(), nullable=False),
        sa.Column("generation", WHOLE, nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("market", sa.String(), nullable=False),
        sa.Column("cloud", sa.String(), nullable=False),
        sa.Column("region", sa.String(), nullable=False),
        sa.Column("zone", sa.String(), nullable=False),
        sa.Column("instance_type", sa.String(), nullable=False),
        sa.Column("accelerator", sa.String(), nullable=False),
        sa.Column("gpus", WHOLE, nullable=False),
        sa.Column("micro_usd_per_hour", WHOLE, nullable=False),
        sa.Column("on_demand_micro_usd_per_hour", WHOLE, nullable=False),
        sa.Column("price_source", sa.String(), nullable=False),
        sa.Column("price_observed_at", sa.String(), nullable=False),
        sa.Column("requested_ms", WHOLE, nullable=False),
        sa.Column("reserved_micro_usd", WHOLE, nullable=False),
        sa.CheckConstraint("micro_usd_per_hour >= 0"),
        sa.CheckConstraint("on_demand_micro_usd_per_hour >= 0"),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["run.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_node_run_id"), ["run_id"], unique=False)

    op.create_table(
        "progress",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("run_id", WHOLE, nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("lineage", WHOLE, nullable=False),
        sa.Column("seq", WHOLE, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("event", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["run.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id", "source", "lineage", "seq"),
    )
    with op.batch_alter_table("progress", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_progress_kind"), ["kind"], unique=False)
        batch_op.create_index(batch_op.f("ix_progress_run_id"), ["run_id"], unique=False)

    op.create_table(
        "run_status",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("run_id", WHOLE, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["run.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("run_status", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_run_status_run_id"), ["run_id"], unique=False)

    op.create_table(
        "billing_interval",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("node_id", WHOLE, nullable=False),
        sa.Column("start_ms", WHOLE, nullable=False),
        sa.Column("end_ms", WHOLE, nullable=False),
        sa.Column("micro_usd_per_hour", WHOLE, nullable=False),
        sa.Column("micro_usd", WHOLE, nullable=False),
        sa.Column("basis", sa.String(), nullable=False),
        sa.CheckConstraint("end_ms >= start_ms"),
        sa.CheckConstraint("micro_usd >= 0"),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["node.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("node_id", "start_ms"),
    )
    with op.batch_alter_table("billing_interval", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_billing_interval_node_id"), ["node_id"], unique=False)

    op.create_table(
        "node_event",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("node_id", WHOLE, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("evidence", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["node.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    with op.batch_alter_table("node_event", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_node_event_node_id"), ["node_id"], unique=False)

    op.create_table(
        "preemption",
        sa.Column("id", WHOLE, nullable=False),
        sa.Column("node_id", WHOLE, nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("noticed_ms", WHOLE, nullable=True),
        sa.Column("signal", sa.String(), nullable=True),
        sa.Column("evidence", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(
            ["node_id"],
            ["node.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("node_id"),
    )


def downgrade() -> None:
    op.drop_table("preemption")
    with op.batch_alter_table("node_event", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_node_event_node_id"))

    op.drop_table("node_event")
    with op.batch_alter_table("billing_interval", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_billing_interval_node_id"))

    op.drop_table("billing_interval")
    with op.batch_alter_table("run_status", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_run_status_run_id"))

    op.drop_table("run_status")
    with op.batch_alter_table("progress", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_progress_run_id"))
        batch_op.drop_index(batch_op.f("ix_progress_kind"))

    op.drop_table("progress")
    with op.batch_alter_table("node", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_node_run_id"))

    op.drop_table("node")
    op.drop_table("controller_lease")
    op.drop_table("run")
