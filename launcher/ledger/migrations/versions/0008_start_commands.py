"""Add the commands that started and continued each run, with the git commits of the code. Older runs have none."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "start_command",
        sa.Column("id", WHOLE, primary_key=True),
        sa.Column("run_id", WHOLE, sa.ForeignKey("run.id"), nullable=False),
        sa.Column("at_ms", WHOLE, nullable=False),
        sa.Column("command", sa.String(), nullable=False),
        sa.Column("code_commit", sa.String(), nullable=False),
        sa.Column("workdir_commit", sa.String(), nullable=False),
    )
    op.create_index("ix_start_command_run_id", "start_command", ["run_id"])


def downgrade() -> None:
    op.drop_table("start_command")
