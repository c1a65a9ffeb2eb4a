"""Add the size of each node's boot disk. Nodes of older versions had 100 GiB."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("node", sa.Column("disk_gib", WHOLE, nullable=False, server_default="100"))


def downgrade() -> None:
    op.drop_column("node", "disk_gib")
