"""Where each trial, timing and baseline ran (`evoattn/storage/schema.py`, environments).

Rows that are there keep NULL: nobody recorded it."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "environments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
    )
    for table in (
        "trials",
        "samples",
        "baselines",
    ):  # as SQL, because Alembic's own way adds the key by itself, which SQLite cannot
        op.execute(f"ALTER TABLE {table} ADD COLUMN environment_id INTEGER REFERENCES environments (id)")
