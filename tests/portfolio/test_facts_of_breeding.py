"""What searches of groups propose stays, until a change wants it otherwise: by made-up times, on the space of a family
that changes seldom."""

from collections.abc import Iterator
from typing import Any

from evoattn.engine.alike import distance, features
from evoattn.engine.breeding import Breeder
from evoattn.engine.groups import Group, Kernel
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from evoattn.portfolio.proposals import AimedBreeder
from tests.support.facts import changed

PLAIN = AttentionProblem(2, 8, 2, 203, 1024, 64, "fp16", "causal_lower_right")
PROBLEMS = [PLAIN, PLAIN.with_(seqlen_q=1), PLAIN.with_(batch=16, seqlen_q=2048, seqlen_k=2048)]
OTHERS = [PLAIN.with_(varlen="1:203/1:1024"), PLAIN.with_(seqused="1:1024"), PLAIN.with_(window="64:0")]
COUNT = 40


def _group(families: tuple[str, ...]) -> Group:
    space = load_space("flash_scalar", GPUS["l4"])
    given = [("flash_scalar", config.params) for config in space.starting_configs()]
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


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    gpu = GPUS["l4"]
    for make in (Breeder, AimedBreeder):
        for seed in (0, 1):
            group = _group(("flash_scalar",))
            yield f"{make.__name__} {seed}", _bred(make(group, gpu, seed), group)
    everyone = [*PROBLEMS, *OTHERS]
    points = [features(problem, gpu) for problem in everyone]
    yield "features", points
    yield "near", Group("all", everyone, ("flash_scalar",)).near(gpu)
    yield "distances", [[distance(one, other) for other in points] for one in points]


def test_what_searches_of_groups_propose_stays():
    assert not changed("breeding")
