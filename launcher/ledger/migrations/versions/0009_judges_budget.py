"""Add the budget of paid judges that `spotrl resume` raised."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("run", sa.Column("max_judges_micro_usd", WHOLE, nullable=True))


def downgrade() -> None:
    op.drop_column("run", "max_judges_micro_usd")
