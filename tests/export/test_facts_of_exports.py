"""What an exported program says of a kernel beside its source stays, until a change wants it otherwise: the C++ of its
launches, constants of the problem, where it came from, and the cards that it is for."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evoattn.export import check, header, host_code, recorded
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Timing, TrialState
from tests.support.facts import answer, changed

ANY = AttentionProblem(2, 8, 2, 300, 500, 64, "fp16", "causal_upper_left", lse=True)
PROBLEMS = {"flash_scalar": ANY.with_(dtype="fp32", layout="bshd"), "flash_mma": ANY, "flash_wmma": ANY}
VARIED = [
    ANY.with_(window="100:0", sink=True, softcap=20.0),
    ANY.with_(seqused="1:500", alibi=True, mask="full"),
    ANY.with_(varlen="1:300/1:500", layout="bshd"),
    ANY.with_(value_dim=48, shared_kv=True),
    ANY.with_(page=16, seqused="1:500", bias=""),
    ANY.with_(bias="hs"),
]
SOURCES = {"sm_80 and newer": "", "any GPU": "", "sm_90a": "wgmma.mma_async.sync", "sm_89 and newer": ""}
TIMED = Timing((3.0, 2.0, 4.0, 3.5), {"stage": "final", "cache": "warm", "run": "r"})
OTHER = Timing((6.0, 5.0, 4.0, 3.5), {"stage": "final", "cache": "cold", "run": "r"})


class Kept:
    """Stands where a database stands."""

    def environments(self, trial: Any) -> list[dict[str, str]]:
        return [{"driver": "CUDA 13.0", "device": "NVIDIA L4"}]

    def peers(self, study: Any) -> dict[str, list[Timing]]:
        return {"flash": [TIMED, OTHER], "cudnn": [Timing((1.0,), {"stage": "screen"})]}

    def refusals(self, study: Any) -> dict[str, str]:
        return {"fa3": "Refused: no Hopper."}


def _of_trials(launches: Any) -> Iterator[Any]:
    study = SimpleNamespace(versions={"evoattn": "0.1"}, name="s*/", gpu="l4", arch="sm_89")
    for state, reason in ((TrialState.COMPLETE, ""), (TrialState.WRONG_RESULT, "It differs by 3 µs.")):
        for timing, parents, info in ((TIMED, (3, 4), CompileInfo(128, 8, 16, 24, 1024)), (None, (), None)):
            trial = SimpleNamespace(number=7, created_at="2026-11-27", state=state, reason=reason, family="flash_mma")
            trial.config, trial.source_hash, trial.operator = {"A": True, "B": 3}, "ab12", "mutation"
            trial.parents, trial.compile_info, trial.timing = parents, info, timing
            of = SimpleNamespace(study=study, trial=trial, problem=ANY, launches=launches)
            lines = recorded.provenance(Kept(), of)
            yield [lines, recorded.comment(lines), [recorded.plain(line) for line in lines]]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for name, problem in PROBLEMS.items():
        family, gpu = FAMILIES[name], GPUS["l4"]
        config = load_space(name, gpu).starting_configs()[0]
        yield f"host code of {name}", host_code.host_code(family, problem, config, gpu)
        launches, scratch = family.launches(problem, config, gpu), family.workspace(problem, config, gpu)
        buffers = check.buffers_of(problem, scratch)
        yield f"constants of {name}", check.problem_constants(problem, 80, launches, scratch)
        yield f"launches of {name}", check._launcher(launches, buffers)
        if name == "flash_mma":
            yield "provenance", list(_of_trials(launches))
            yield "varied", [answer(check.problem_constants, one, 89, launches, scratch) for one in VARIED]
            eight = ANY.with_(dtype="e4m3", bias="", lse=False)
            others = (
                eight,
                eight.with_(scales="head"),
                ANY.with_(bias="", blocks="128x64:70+200"),
                ANY.with_(score="s*2"),
            )
            yield "references", [check.has_reference(one) for one in (*VARIED, *others)]
    for name in ("mine", "1st", "class", "torch", "json", "a-b"):
        with tempfile.TemporaryDirectory() as folder:
            said = answer(header.write_folder, {"a.py": "x"}, Path(folder) / name)
            yield f"folder {name}", [said, sorted(path.name for path in Path(folder).rglob("*"))]
    for devices, source in SOURCES.items():
        of = SimpleNamespace(source=source, family=SimpleNamespace(devices=devices), launches=())
        target = recorded.Target.of(of)
        yield f"target {devices}", [target.words, target.requirement, target.guard, target.nvcc_flags, target.is_exact]


def test_what_an_exported_program_says_stays():
    assert not changed("exports")
