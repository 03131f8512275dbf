"""Records to rows and back. A row may come from somebody else's database, so every value read is checked."""

import hashlib
import math
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult, CompileInfo, Study, Timing, Trial, TrialState, ValidationReport
from evoattn.storage.errors import DamagedRecord, StorageError
from evoattn.storage.schema import STAGES

MAX_SOURCE_BYTES = 16 << 20
"""No rendered kernel comes near; a row that unpacks to more is not ours."""


def unpack_source(source_hash: str, packed: bytes) -> str:
    """The text, proved by its hash. Raises `StorageError` if it is not what was recorded."""
    try:
        data = zlib.decompressobj().decompress(packed, MAX_SOURCE_BYTES)
    except (zlib.error, TypeError):
        data = b""
    if hashlib.sha256(data).hexdigest() != source_hash:
        raise StorageError(
            f"The source {source_hash[:12]} is not in the database as it was recorded; use another copy of it."
        )
    return data.decode()


Row = Mapping[Any, Any]
"""By column; SQLAlchemy's `RowMapping` is one too."""
_Record = TypeVar("_Record")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters, and those that change the direction of text or break lines."""
_ARCH = re.compile(r"sm_\d{2,3}[af]?")
"""It goes into a compiler's options and into a command line that `export` proposes."""


def _number(value: Any) -> float:
    """A JSON number, or one of the words by which `_json_float` stands in for what JSON lacks."""
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in ("nan", "inf", "-inf")):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _json_float(value: float) -> float | str:
    """JSON has no NaN and no infinity, but a wrong kernel's error is often one of them."""
    return value if math.isfinite(value) else str(value)


def each(kind: type | tuple[type, ...], values: Any, container: type) -> Any:
    """`values` if it is a `container` that holds only `kind`. Raises `TypeError`."""
    inside = values.values() if isinstance(values, dict) else values
    if not (isinstance(values, container) and all(issubclass(found, kind) for found in set(map(type, inside)))):
        raise TypeError(f"{str(values)[:80]!r} is not of the kind that belongs here")
    return values


def plain_text(value: Any) -> str:
    """A recorded string as terminals and pages may show it: control characters, which can drive a terminal, become
    `?`."""
    text = str(value)
    return text if text.isprintable() else _CONTROL.sub("?", text)


def checked(what: str, build: Callable[[], _Record]) -> _Record:
    """What `build` makes of a row. Raises `DamagedRecord`, which names `what`, if a value is missing or not of its
    kind."""
    try:
        return build()
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DamagedRecord(f"{what} is damaged in the database ({error}); use another copy of it.") from None


def study_from_row(row: Row) -> Study:
    """Raises `StorageError` if a value is not of its kind."""

    def build() -> Study:
        problem: dict[str, Any] = {
            name: plain_text(v) if isinstance(v, str) else v
            for name, v in each((int, float, str), row["problem"], dict).items()
        }
        AttentionProblem(**problem)
        if not _ARCH.fullmatch(row["arch"]):
            raise ValueError(f"{row['arch']!r} is no architecture")
        if each(object, row["options"], dict).get("cache", "warm") not in ("warm", "cold"):
            raise ValueError("its cache mode is neither warm nor cold")
        return Study(
            row["id"],
            plain_text(row["name"]),
            problem,
            plain_text(row["gpu"]),
            row["arch"],
            bool(row["offline"]),
            plain_text(row["sampler"]),
            int(row["seed"]),
            tuple(each(str, row["families"], list)),
            _facts(row["versions"]),
            row["options"],
            plain_text(row["created_at"]),
        )

    return checked(f"Study {plain_text(row['name'])!r}", build)


def _facts(value: Any) -> dict[str, str]:
    return {plain_text(name): plain_text(fact) for name, fact in each(str, value, dict).items()}


def environment_from_row(row: Row) -> dict[str, str]:
    """Raises `StorageError` if a value is not of its kind."""
    return checked(f"Environment {row['id']}", lambda: _facts(row["facts"]))


def timing_to_row(timing: Timing) -> dict[str, Any]:
    return {
        "stage": STAGES.index(timing.protocol["stage"]),
        "median_us": timing.median_us,
        "protocol": timing.protocol,
        "samples_us": list(timing.samples_us),
    }


def timing_from_row(row: Row) -> Timing:
    """Raises `StorageError` if a value is not of its kind."""

    def build() -> Timing:
        samples = tuple(_number(v) for v in each((int, float), row["samples_us"], list))
        protocol = _plain(each(object, row["protocol"], dict))
        STAGES.index(protocol["stage"])
        each(str, protocol.get("sanitizer", {}), dict)
        each(str, each(object, protocol.get("clocks", {}), dict).get("throttled_by", []), list)
        if not 0 < _number(protocol.get("board_factor", 1.0)) < math.inf:
            raise ValueError("no factor of a board")
        if not samples and not protocol.get("out"):
            raise ValueError("no samples")
        return Timing(samples, protocol)

    return checked("A timing", build)


def _plain(value: Any) -> Any:
    """JSON with every string in it as `plain_text`."""
    if isinstance(value, dict):
        return {plain_text(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return plain_text(value) if isinstance(value, str) else value


def _validation_to_json(report: ValidationReport) -> dict[str, Any]:
    checks = [
        vars(c) | {"max_error": _json_float(c.max_error), "allowed_error": _json_float(c.allowed_error)}
        for c in report.checks
    ]
    return {"backend": report.backend, "checks": checks, "seed": report.seed}


def _validation_from_json(value: dict[str, Any]) -> ValidationReport:
    checks = tuple(
        CheckResult(
            plain_text(c["case"]),
            c["passed"] is True,
            _number(c["max_error"]),
            _number(c["allowed_error"]),
            plain_text(c["reason"]),
            _number(c.get("seconds", 0.0)),
        )
        for c in each(dict, value["checks"], list)
    )
    seed = value.get("seed")
    backend = value["backend"]
    if backend not in ("cuda", "interpreter"):
        raise ValueError(f"{str(backend)[:80]!r} is no backend")
    return ValidationReport(backend, checks, None if seed is None else int(seed))


_COMPILE_COLUMNS = {
    "registers": "registers",
    "spill_store_bytes": "spill_store_bytes",
    "spill_load_bytes": "spill_load_bytes",
    "stack_bytes": "stack_bytes",
    "static_smem_bytes": "static_smem_bytes",
    "seconds": "compile_seconds",
    "compiler": "compiler",
}
"""Fields of `CompileInfo` that are plain columns; its two tuples are JSON."""
EVIDENCE_COLUMNS = frozenset(_COMPILE_COLUMNS.values()) | {
    "compile_options",
    "compile_warnings",
    "validation",
    "environment_id",
}
"""What only one trial's own page needs."""


def evidence_to_row(info: CompileInfo | None, validation: ValidationReport | None) -> dict[str, Any]:
    """The columns of `trials` that hold what compiler and validation said."""
    row: dict[str, Any] = {"validation": validation and _validation_to_json(validation)}
    if info:
        row |= {column: getattr(info, field) for field, column in _COMPILE_COLUMNS.items()}
        row |= {"compile_options": list(info.options), "compile_warnings": list(info.warnings)}
    return row


def trial_from_row(row: Row, timings: tuple[Timing, ...]) -> Trial:
    """The trial, without its evidence where the query left those columns out.

    Raises `StorageError` if a value is not of its kind."""

    def build() -> Trial:
        info = None
        if "registers" in row and row["registers"] is not None:
            fields = {field: row[column] for field, column in _COMPILE_COLUMNS.items()} | {
                "compiler": plain_text(row["compiler"])
            }
            info = CompileInfo(
                **each((int, float, str), fields, dict),
                options=tuple(map(plain_text, each(str, row["compile_options"], list))),
                warnings=tuple(map(plain_text, each(str, row["compile_warnings"], list))),
            )
            each(int, [info.registers, info.spill_bytes, info.stack_bytes, info.static_smem_bytes], list)
        validation = row.get("validation")
        cost = None if row["relative_cost"] is None else _number(row["relative_cost"])
        if cost is not None and cost <= 0:
            raise ValueError(f"a relative cost of {cost}")
        return Trial(
            row["number"],
            row["study_id"],
            plain_text(row["family"]),
            each((int, float, str), row["config"], dict),
            plain_text(row["config_id"]),
            TrialState(row["state"]),
            plain_text(row["reason"]),
            row["source_hash"],
            info,
            None if validation is None else _validation_from_json(validation),
            timings,
            cost,
            tuple(each(int, row["parents"], list)),
            plain_text(row["operator"]),
            plain_text(row["created_at"]),
            _number(row["seconds"]),
        )

    return checked(f"Trial {row['number']}", build)
