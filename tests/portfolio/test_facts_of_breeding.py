"""What searches of groups propose, and what is said of how picks were judged, stays, until a change wants it otherwise:
by made-up times, on the space of a family that changes seldom."""

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from evoattn.cost.correction import NONE
from evoattn.engine.breeding import Breeder
from evoattn.engine.groups import Group, Kernel, distance, features
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio import calibrate, campaign, pick, select, workload
from evoattn.portfolio.calibrations import Calibration
from evoattn.portfolio.kernels import KernelList
from evoattn.portfolio.proposals import AimedBreeder
from tests.support.facts import changed

PLAIN = AttentionProblem(2, 8, 2, 203, 1024, 64, "fp16", "causal_lower_right")
PROBLEMS = [PLAIN, PLAIN.with_(seqlen_q=1), PLAIN.with_(batch=16, seqlen_q=2048, seqlen_k=2048)]
OTHERS = [
    *(PLAIN.with_(varlen="1:203/1:1024"), PLAIN.with_(seqused="1:1024"), PLAIN.with_(window="64:0")),
    *(PLAIN.with_(mask="full", window=window) for window in ("2000:40", "64:2000", "64:40")),
]
COUNT = 40


def _group(families: tuple[str, ...], many: int = 0) -> Group:
    """A group to which its starting configs are given, and so many that differ from the first one in one gene."""
    space = load_space("flash_scalar", GPUS["l4"])
    given = [("flash_scalar", config.params) for config in space.starting_configs()]
    near = [given[0][1] | {p.name: value} for p in space.parameters for value in p.values]
    given += [("flash_scalar", params) for params in near[:many]]
    return Group("a group", list(PROBLEMS), families, given=given)


def _time(kernel: Kernel, target: int) -> float:
    return 1.0 + int(kernel.id[:6], 16) % 997 + target


def _bred(breeder: Breeder, group: Group) -> list[Any]:
    found: list[Any] = []
    for number in range(COUNT):
        made = breeder.propose()
        if made is None:
            found.append(None)
            continue
        kernel, target = made
        serves = breeder.serves(kernel)
        found.append([kernel.family, list(kernel.params.values()), kernel.origin, target, serves])
        kernel.times = {index: _time(kernel, index) for index in serves[: 1 + number % 3]}
        kernel.rough = {0} if number % 5 == 4 else set()
        group.kernels[kernel.id] = kernel
    leaders = [[list(kernel.params.values()) for kernel in group.leaders(index, 4)] for index in range(3)]
    return [found, leaders, [group.best(index) for index in range(3)]]


def _judged() -> list[select.Checked]:
    """A pick behind the best, one that is the best, one alone, a wrong one, and none."""
    pick, other = ("flash_scalar", {"A": 1}), ("flash_mma", {"B": 2})
    peers = {"flash": 9.0, "cudnn": 6.5, "fa3": 5.5}
    return [
        select.Checked("a", "g", pick, "", 6.0, 5.0, other, 7, peers, {"math": "no"}, "", {"x": 5.0, "y": 6.0}),
        select.Checked("b", "g", pick, "", 4.0, 4.0, pick, 3, {"flash": 4.5}, {}, "", {"y": 4.0}),
        select.Checked("c", "g", pick, "", 4.0, 3.5, None, 3),
        select.Checked("d", "g", pick, "It differs.", None, 5.0, other, 3, {"fa3": 4.5}),
        select.Checked("e", "g", None, "There is no pick.", None, None, None, 0),
    ]


def _campaigns() -> Iterator[tuple[str, Any]]:
    drawn = [
        *workload.draw(3, 20),
        *workload.DRAWS[workload.WIDE](3, 20),
        *workload.DRAWS[workload.SCORES](3, 20),
        *PROBLEMS,
        *OTHERS,
    ]
    said = [[campaign.group_of(p), campaign.bits_of(p)] for p in drawn]
    yield "kinds", [said, [campaign.stand_in(p).describe() for p in drawn]]
    yield "by group", {name: len(of) for name, of in campaign.by_group(drawn).items()}
    yield "chosen", [p.describe() for p in campaign.chosen(drawn, 12)]
    group = _group(("flash_scalar",))
    _bred(Breeder(group, GPUS["l4"], 3), group)
    yield "contenders", [[kernel.id[:9] for kernel in campaign.contenders(group, most)] for most in (1, 3, 9)]


def _summaries() -> Iterator[tuple[str, Any]]:
    rows, group = _judged(), _group(("flash_scalar",))
    ahead = [[row.ahead_of(row.peers), row.ahead_of(row.sdpa), row.line(), row.to_dict()] for row in rows]
    yield "judged", [ahead, select.summary(rows), select.summary(rows[:1])]
    places = [((group, index), row) for index, row in enumerate(rows[:3])]
    yield "tables", select.final_tables(places)


def _calibrated(parts: list[tuple[bool, float]], judged: int, played: bool) -> list[str]:
    """What a calibration does, call by call: of two groups, of which one has kernels given, with 50 s that are over
    after so many looks at the clock."""
    log, now, said = mock.MagicMock(), itertools.count(100.0, 7.0), list[str]()
    groups = [SimpleNamespace(name=name, given=given, problems=name, families=f"of {name}") for name, given in
              (("a", []), ("b", ["kept"]), ("c", []))]  # fmt: skip
    made = SimpleNamespace(groups=groups, search_seconds=60.0, judge_seconds=20.0, judged=["p"] * judged, describe=str)
    made.describe = lambda: "so many groups"
    rows = [(None, SimpleNamespace(line=lambda number=number: f"row {number}")) for number in range(judged)]
    listed = KernelList("sm_89", (), (), {}, {}, ("k", "l"), (), {"plain": (0,)})
    found = Calibration({}, {}, "today", listed, NONE, {}, 9)
    engine = log.GroupSearch.return_value.__enter__.return_value
    engine.compiled, engine.measured = 5, 6
    log.ProcessPoolExecutor.return_value.__enter__.return_value.map = map
    fakes = {"Journal": log.Journal, "GroupSearch": log.GroupSearch, "Keeper": log.Keeper, "LocalFleet": log.LocalFleet}
    fakes |= {"plan": lambda *_: made, "turns": lambda _: parts, "make": mock.Mock(return_value=found)}
    fakes |= {"ProcessPoolExecutor": log.ProcessPoolExecutor, "learning": log.learning}
    fakes |= {"check_all": mock.Mock(return_value=rows), "summary": lambda rows: {"rows": len(rows)}}
    fakes |= {"_regrets": lambda rows: {"plain": 1.0 * len(rows)}, "first_choice": lambda _: "1.02"}
    fakes |= {"is_played": lambda _: played, "calibration_folder": lambda gpu: f"folder of {gpu}"}
    fakes["time"] = SimpleNamespace(monotonic=lambda: next(now))
    with (
        mock.patch.multiple(calibrate, **fakes),
        mock.patch.object(calibrate.campaign, "given", lambda *words: words),
        mock.patch.object(calibrate.calibrations, "save", log.save),
        mock.patch.object(calibrate.pick, "forget", log.forget),
    ):
        done = calibrate.calibrate(calibrate.Wanted(200.0, (), jobs=3), "card", said.append, "tools")
    asked = [call.args for call in fakes["check_all"].call_args_list]
    calls = [
        f"{name} {[one for one in args if isinstance(one, (str, int, float))]}" for name, args, _ in log.mock_calls
    ]
    judged_by = [words[2] for words in asked]
    saved = [call.args[0] is done.calibration for call in log.save.call_args_list]
    return [
        said,
        calls,
        [group.given for group in groups],
        judged_by,
        saved,
        done.calibration.judged,
        done.calibration.listed.regret,
    ]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    gpu = GPUS["l4"]
    for make in (Breeder, AimedBreeder):
        for seed in (0, 1):
            group = _group(("flash_scalar",), 90 * seed)
            yield f"{make.__name__} {seed}", _bred(make(group, gpu, seed), group)
    everyone = [*PROBLEMS, *OTHERS]
    points = [features(problem, gpu) for problem in everyone]
    yield "features", points
    yield "near", Group("all", everyone, ("flash_scalar",)).near(gpu)
    yield "distances", [[distance(one, other) for other in points] for one in points]
    yield from _campaigns()
    turns = [(False, 1.0)], [(True, 0.5), (True, 1.0)], [(False, 0.4), (True, 0.7)]
    for parts, judged, played in itertools.product(turns, (0, 3), (False, True)):
        yield f"calibrated {parts} {judged} {played}", _calibrated(parts, judged, played)
    yield from _summaries()
    packed = OTHERS[0].with_(layout="bshd")
    yield "rows of keys", [pick._rows_of_keys(one) for one in (packed, packed.with_(page=16), PLAIN)]
    steps = (4, 9, 3, 64), (3, 100, 90, 64), (1, 7, 7, 100), (5, 400, 100, 4000), (2, 200, 100, 999)
    yield "steps of engines", [pick._step_of_engine(*step) for step in steps]


@pytest.mark.slow
def test_what_searches_of_groups_propose_stays():
    assert not changed("breeding")
