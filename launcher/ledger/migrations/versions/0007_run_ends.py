"""Add the time at which a run must end, beside the deadline, which becomes a goal."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("run", sa.Column("ends_ms", WHOLE, nullable=True))


def downgrade() -> None:
    op.drop_column("run", "ends_ms")
