"""The tables. Of results, rows are only ever added: none is updated or deleted."""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

REVISION = "0004"
"""The newest revision under `db/versions`: what this program reads and writes."""
VERSION_TABLE = "evoattn_version"
"""Where Alembic keeps the revision; its name also tells our databases from foreign ones."""

metadata = MetaData()

studies = Table(
    "studies",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("gpu", String(40), nullable=False),
    Column("arch", String(20), nullable=False),
    Column("offline", Boolean, nullable=False),
    Column("sampler", String(40), nullable=False),
    Column("seed", BigInteger().with_variant(Integer, "sqlite"), nullable=False),
    Column("problem", JSON, nullable=False),
    Column("families", JSON, nullable=False),
    Column("versions", JSON, nullable=False),
    Column("options", JSON, nullable=False),
    Column("created_at", String(40), nullable=False),
)
"""One search. `created_at`, here and below, is UTC in ISO 8601."""

sources = Table(
    "sources", metadata, Column("hash", String(64), primary_key=True), Column("zlib", LargeBinary, nullable=False)
)
"""Rendered text, once for each sha256 of its UTF-8 bytes. Compressed, as a day's search renders some 500 MB."""

environments = Table(
    "environments",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("hash", String(64), nullable=False, unique=True),
    Column("facts", JSON, nullable=False),
    Column("created_at", String(40), nullable=False),
)
"""Where trials ran: versions, compiler, host, device and its driver (`evoattn/storage/versions.py`), once for each
sha256 of their canonical JSON.

A study may go on on another machine or with another version, so each trial, timing and peer names its own. NULL: nobody
said where; the study's `versions` hold the facts from when it was made."""

trials = Table(
    "trials",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("family", String(40), nullable=False),
    Column("config_id", String(64), nullable=False),
    Column("state", String(20), nullable=False),
    Column("reason", Text, nullable=False),
    Column("relative_cost", Float),
    Column("source_hash", String(64), ForeignKey("sources.hash")),
    Column("registers", Integer),
    Column("spill_store_bytes", Integer),
    Column("spill_load_bytes", Integer),
    Column("stack_bytes", Integer),
    Column("static_smem_bytes", Integer),
    Column("compile_seconds", Float),
    Column("compiler", String(40)),
    Column("operator", String(40), nullable=False),
    Column("created_at", String(40), nullable=False),
    Column("seconds", Float, nullable=False),
    Column("config", JSON, nullable=False),
    Column("parents", JSON, nullable=False),
    Column("compile_options", JSON(none_as_null=True)),
    Column("compile_warnings", JSON(none_as_null=True)),
    Column("validation", JSON(none_as_null=True)),
    Column("environment_id", Integer, ForeignKey("environments.id")),
    Index("trials_by_number", "study_id", "number"),
    Index("trials_by_config", "study_id", "config_id"),
    Index("trials_by_state", "study_id", "state", "reason"),
    Index("trials_by_cost", "study_id", "state", "relative_cost"),
)
"""One evaluation of one candidate. The columns of the compiler's report are NULL where nothing was compiled. Wide
columns come last, because SQLite need not read a row beyond the last column that a query names."""

samples = Table(
    "samples",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("trial_number", Integer, ForeignKey("trials.number"), nullable=False),
    Column("stage", Integer, nullable=False),
    Column("median_us", Float, nullable=False),
    Column("protocol", JSON, nullable=False),
    Column("samples_us", JSON, nullable=False),
    Column("environment_id", Integer, ForeignKey("environments.id")),
    Index("samples_by_trial", "trial_number", "stage", "id", "median_us"),
)
"""One timing of a trial: all of its raw samples in µs, and their median for queries. `stage` is an index into
`STAGES`."""

baselines = Table(
    "baselines",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("backend", String(40), nullable=False),
    Column("refusal", Text, nullable=False),
    Column("protocol", JSON(none_as_null=True)),
    Column("samples_us", JSON(none_as_null=True)),
    Column("environment_id", Integer, ForeignKey("environments.id")),
    Index("baselines_by_study", "study_id", "backend"),
)
"""One timing of a peer in a study, or the sentence with which it refused the problem. `backend` is the peer's name."""

profiles = Table(
    "profiles",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("study_id", Integer, ForeignKey("studies.id"), nullable=False),
    Column("trial_number", Integer, ForeignKey("trials.number")),
    Column("peer", String(40), nullable=False),
    Column("tool", String(40), nullable=False),
    Column("cache", String(10), nullable=False),
    Column("kernels", JSON, nullable=False),
    Column("environment_id", Integer, ForeignKey("environments.id")),
    Column("created_at", String(40), nullable=False),
    Index("profiles_by_trial", "study_id", "trial_number"),
)
"""Hardware counters of one call of a trial's kernel, or (`trial_number` NULL) of a peer on the study's problem."""

writes = Table(
    "writes", metadata, Column("writer", String(32), primary_key=True), Column("number", BigInteger, nullable=False)
)
"""The last write of each program to a PostgreSQL server (`evoattn/storage/patience.py`): after a crash
its row tells whether the server kept it. No result, so it is not copied with them; empty in SQLite."""

STAGES = ("screen", "repeat", "final")
"""`Timing.protocol["stage"]`, the least trusted first."""
