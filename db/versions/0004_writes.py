"""The last transaction of each program (`evoattn/storage/schema.py`, writes)."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "writes",
        sa.Column("writer", sa.String(32), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
