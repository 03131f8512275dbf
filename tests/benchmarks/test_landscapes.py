"""`benchmarks/samplers/landscapes.py` without a GPU: what it records can be read again, cut short or not."""

import hashlib
from functools import partial

import pytest

from benchmarks.samplers import landscape_ahead, landscapes
from benchmarks.samplers.landscape_groups import SEEDS, make_groups
from benchmarks.samplers.landscape_surveyor import Aim, Surveyor, take_turns
from evoattn.cost import landscapes as landscape
from evoattn.cost.measurements import LANDSCAPES
from evoattn.engine.group_search import GroupSearch, Manner
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Surveyed
from evoattn.families import registry
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.space import KernelConfig
from evoattn.portfolio.workload import BUILD_SEEDS

H100 = GPUS["h100"]


class FakeStage(Handler):
    """Times that the config alone decides, 50 to 100 µs; the second measurement is 1 % longer. Some configs fail."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        number = int(hashlib.md5(task.kernel.config.id.encode()).hexdigest()[:4], 16)
        if number % 3 == 0:
            return Surveyed(failure="wrong: as planned")
        us = (50 + 50 * number / 65536) * (1.0 if task.check else 1.01)
        return Surveyed(((us, us > 90 and task.check),) * len(task.problems))


FAKES = Tools(make_device=FakeStage)


@pytest.mark.slow
def test_the_groups_are_of_different_kinds_and_beyond_the_portfolios_problems():
    groups = make_groups(H100)
    problems = [p for g in groups for p in g.problems]
    assert len(problems) == len(set(problems)) >= 40
    assert sum(not p.name for p in problems) >= len(problems) / 2
    assert any(p.window and p.sink for p in problems) and any(p.seqlen_k < p.seqlen_q for p in problems)
    assert {p.dtype for p in problems} == {"fp16", "bf16", "fp32"} and len({p.head_dim for p in problems}) >= 4
    assert any(p.seqlen_q == 1 for p in problems) and any(p.causal for p in problems)
    assert not set(SEEDS) & set(BUILD_SEEDS)
    for group in groups:  # one compiled kernel serves a group
        assert len({(p.dtype, p.head_dim, p.mask) for p in group.problems}) == 1
        assert {f for f, _ in group.given} <= set(group.families)


def recorded(path, count, *earlier):
    """The group of a recording of `count` configs beside those of earlier ones."""
    (group,) = make_groups(H100, most=3, only="fp32 d64 full")
    landscapes.go_on_from([group], earlier, 3)
    assert bool(group.spent) == bool(earlier) and len(group.kernels) <= group.spent
    record = landscapes.Record(path, {"gpu": "h100"}, [group], H100)
    with GroupSearch([group], H100, Manner(Surveyor, len(earlier), 99, 99), LocalFleet(1), FAKES) as engine:
        landscapes.survey(engine, record, count)
    return group


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    path = tmp_path_factory.mktemp("first") / "a.jsonl.gz"
    return path, recorded(path, 12)


@pytest.mark.slow
def test_a_recording_can_be_read_again(first):
    path, group = first
    found = landscape.load(path)
    assert [s.problem for s in found] == group.problems and found[0].about == {"gpu": "h100"}
    assert any(c.state == "wrong: as planned" for one in found for c in one.configs)
    kernels = list(group.kernels.values())
    for index, one in enumerate(found):
        right = [c for c in one.configs if c.us is not None]
        assert len(right) > 2 and {c.family for c in right} <= set(group.families)
        assert any(c.again for c in right) and one.best == min(c.us for c in right)
        for config in right:
            kernel = next(k for k in kernels if k.family == config.family and k.params == config.params)
            assert config.us == pytest.approx(kernel.times[index], rel=1e-4)
            assert config.rough == (index in kernel.rough)
            made = KernelConfig(config.family, config.params)
            assert not registry.lookup(config.family).why_invalid(one.problem, made, H100)
            assert config.device_s > 0 and (config.compile_s > 0.05 or config.compile_s == 0)


@pytest.mark.slow
def test_a_recording_goes_on_from_an_earlier_one(tmp_path, first):
    first, second = first[0], tmp_path / "b.jsonl.gz"
    recorded(second, 8, first)
    one, two, both = landscape.load(first)[0], landscape.load(second)[0], landscape.load(first, second)[0]
    names = [{KernelConfig(c.family, c.params).id for c in land.configs} for land in (one, two, both)]
    again = {
        KernelConfig(c.family, c.params).id
        for land in landscape.load(first)
        for c in sorted((c for c in land.configs if c.us), key=lambda c: c.best_us)[: landscapes.COMMON]
    }
    assert names[1] - names[0] and names[0] & names[1] <= again and names[2] == names[0] | names[1]
    assert both.problem == one.problem == two.problem and len({c.number for c in both.configs}) == len(both.configs)


def _surveyor(group, **words):
    return Surveyor(group, H100, 0, **words)


def test_the_compile_processes_serve_the_group_that_misses_the_fewest_configs():
    groups = [Group(str(i), [lookup("seed_h100")], ("flash_mma",)) for i in range(3)]
    lacking = (Aim((0,), 100, {0: 40}), Aim((0,), 100, {0: 90}), Aim((0,), 100, {0: 0}))
    surveyors = {g.name: _surveyor(g, aim=a) for g, a in zip(groups, lacking)}
    take_turns(groups, surveyors, 100)
    assert [s.aim.turn for s in surveyors.values()] == [False, True, False]
    assert max(groups, key=lambda g: g.weight) is groups[1]
    assert surveyors["0"].propose() is None
    for number in range(10):
        made = Kernel("flash_mma", {"number": number}, state="right", times={0: 1.0})
        groups[1].kernels[made.id] = made
    take_turns(groups, surveyors, 100)
    assert [s.aim.turn for s in surveyors.values()] == [True, False, False]


@pytest.mark.slow
def test_only_the_problems_of_the_aim_are_timed():
    (group,) = make_groups(H100, most=4, only="fp16 d512 full")
    surveyor = _surveyor(group, aim=Aim((1, 3)))
    found = [surveyor.propose() for _ in range(20)]
    assert {index for kernel, target in filter(None, found) for index in (target, *surveyor.serves(kernel))} == {1, 3}


@pytest.mark.slow
def test_fewer_problems_than_an_earlier_file_has_are_the_first_ones():
    (group,) = make_groups(H100, most=2, only="fp16 d512 full")
    problems, path = list(group.problems), LANDSCAPES / "h100-b"
    right = landscapes.go_on_from([group], [path], 2)
    assert group.problems == problems and set(right[group.name]) == {0, 1}
    assert {i for k in group.kernels.values() for i in k.times} == {0, 1}


@pytest.mark.slow
def test_configs_are_compiled_for_the_other_groups_when_one_has_none_left(tmp_path):
    *none, some = make_groups(H100, most=1, only="fp")[:3]
    for group in none:
        group.families = ()
    assert landscape_ahead.compile_for(tmp_path, [*none, some], {}, H100, 0.1, 1) >= 1
    assert set(landscape_ahead.configs_of(tmp_path)) == {some.name}


@pytest.mark.slow
def test_what_was_compiled_ahead_is_recorded_without_a_compile(tmp_path):
    (group,) = make_groups(H100, most=2, only="fp32 d64 full")
    assert landscape_ahead.compile_for(tmp_path, [group], {}, H100, 0.1, 2)
    group.kernels.clear()
    configs, ahead = landscape_ahead.configs_of(tmp_path), landscape_ahead.read(tmp_path, [group], H100)
    make = partial(Surveyor, aim=Aim((0, 1), turn=False))
    with GroupSearch([group], H100, Manner(make, ahead=ahead), LocalFleet(1), FAKES) as engine:
        engine.run(4)
    done = list(group.kernels.values())
    assert {k.id for k in done} == {KernelConfig(*config).id for config in configs[group.name]} and not engine.compiled
    assert all(k.state != "new" and k.registers for k in done)
