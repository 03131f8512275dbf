"""Hardware counters of trials and peers (`evoattn/storage/schema.py`, profiles); seeds of 64 bits, which an integer of
SQLite holds anyway."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "profiles",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        sa.Column("trial_number", sa.Integer, sa.ForeignKey("trials.number")),
        sa.Column("peer", sa.String(40), nullable=False),
        sa.Column("tool", sa.String(40), nullable=False),
        sa.Column("cache", sa.String(10), nullable=False),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id")),
        sa.Column("created_at", sa.String(40), nullable=False),
    )
    op.create_index("profiles_by_trial", "profiles", ["study_id", "trial_number"])
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("studies", "seed", type_=sa.BigInteger)
