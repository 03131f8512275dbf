"""The first tables (what each holds: `evoattn/storage/schema.py`). Nothing older was released."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "studies",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.String(200), nullable=False, unique=True),
        sa.Column("gpu", sa.String(40), nullable=False),
        sa.Column("arch", sa.String(20), nullable=False),
        sa.Column("offline", sa.Boolean, nullable=False),
        sa.Column("sampler", sa.String(40), nullable=False),
        sa.Column("seed", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("problem", sa.JSON, nullable=False),
        sa.Column("families", sa.JSON, nullable=False),
        sa.Column("versions", sa.JSON, nullable=False),
        sa.Column("options", sa.JSON, nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
    )
    op.create_table(
        "sources",
        sa.Column("hash", sa.String(64), primary_key=True),
        sa.Column("zlib", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "environments",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("hash", sa.String(64), nullable=False, unique=True),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
    )
    op.create_table(
        "trials",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        sa.Column("family", sa.String(40), nullable=False),
        sa.Column("config_id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("relative_cost", sa.Float),
        sa.Column("source_hash", sa.String(64), sa.ForeignKey("sources.hash")),
        sa.Column("registers", sa.Integer),
        sa.Column("spill_store_bytes", sa.Integer),
        sa.Column("spill_load_bytes", sa.Integer),
        sa.Column("stack_bytes", sa.Integer),
        sa.Column("static_smem_bytes", sa.Integer),
        sa.Column("compile_seconds", sa.Float),
        sa.Column("compiler", sa.String(40)),
        sa.Column("operator", sa.String(40), nullable=False),
        sa.Column("created_at", sa.String(40), nullable=False),
        sa.Column("seconds", sa.Float, nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("parents", sa.JSON, nullable=False),
        sa.Column("compile_options", sa.JSON),
        sa.Column("compile_warnings", sa.JSON),
        sa.Column("validation", sa.JSON),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id")),
    )
    op.create_index("trials_by_number", "trials", ["study_id", "number"])
    op.create_index("trials_by_config", "trials", ["study_id", "config_id"])
    op.create_index("trials_by_state", "trials", ["study_id", "state", "reason"])
    op.create_index("trials_by_cost", "trials", ["study_id", "state", "relative_cost"])
    op.create_table(
        "samples",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("trial_number", sa.Integer, sa.ForeignKey("trials.number"), nullable=False),
        sa.Column("stage", sa.Integer, nullable=False),
        sa.Column("median_us", sa.Float, nullable=False),
        sa.Column("protocol", sa.JSON, nullable=False),
        sa.Column("samples_us", sa.JSON, nullable=False),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id")),
    )
    op.create_index("samples_by_trial", "samples", ["trial_number", "stage", "id", "median_us"])
    op.create_table(
        "baselines",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("study_id", sa.Integer, sa.ForeignKey("studies.id"), nullable=False),
        sa.Column("backend", sa.String(40), nullable=False),
        sa.Column("refusal", sa.Text, nullable=False),
        sa.Column("protocol", sa.JSON),
        sa.Column("samples_us", sa.JSON),
        sa.Column("environment_id", sa.Integer, sa.ForeignKey("environments.id")),
    )
    op.create_index("baselines_by_study", "baselines", ["study_id", "backend"])
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
    op.create_table(
        "writes",
        sa.Column("writer", sa.String(32), primary_key=True),
        sa.Column("number", sa.BigInteger, nullable=False),
    )
