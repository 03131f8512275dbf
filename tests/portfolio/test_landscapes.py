"""`scripts/landscapes.py` without a GPU: what it records can be read again, cut short or not."""

import hashlib

import landscapes
import pytest
from landscape_groups import SEEDS, make_groups

from evoattn.evaluation.process import Handler
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.space import KernelConfig
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.workload import BUILD_SEEDS
from evoattn.samplers import landscape

H100 = GPUS["h100"]


class PuppetStage(Handler):
    """Times that the config alone decides, 50 to 100 µs; the second measurement is 1 % longer. Some configs fail."""

    def __init__(self, gpu, seed=0):
        pass

    def __call__(self, task):
        if task[0] == "register":
            return None
        job = task[1]
        number = int(hashlib.md5(job.kernel.config.id.encode()).hexdigest()[:4], 16)
        if number % 8 == 0:
            return "wrong: as planned"
        us = (50 + 50 * number / 65536) * (1.0 if job.check else 1.01)
        return dict.fromkeys(job.indexes, (us, us > 90 and job.check))


@pytest.mark.slow
def test_the_groups_are_of_different_kinds_and_beyond_the_portfolios_problems():
    groups = make_groups(H100)
    problems = [p for g in groups for p in g.problems]
    assert len(problems) == len(set(problems)) >= 40
    assert sum(not p.name for p in problems) >= len(problems) / 2
    assert {p.dtype for p in problems} == {"fp16", "bf16", "fp32"} and len({p.head_dim for p in problems}) >= 4
    assert any(p.seqlen_q == 1 for p in problems) and any(p.causal for p in problems)
    assert not set(SEEDS) & set(BUILD_SEEDS)
    for group in groups:  # one compiled kernel serves a group
        assert len({(p.dtype, p.head_dim, p.mask) for p in group.problems}) == 1
        assert {f for f, _ in group.given} <= set(group.families)


@pytest.mark.slow
def test_a_recording_can_be_read_again(tmp_path):
    group = next(g for g in make_groups(H100, most=3) if g.name == "fp32 d64 full")
    path = tmp_path / "l.jsonl.gz"
    record = landscapes.Record(path, {"gpu": "h100"}, [group], H100)
    with Engine([group], H100, jobs=2, stage=PuppetStage, sample=99, most=99, breeder=landscapes.Surveyor) as engine:
        landscapes.survey(engine, record, 12)
    found = landscape.load(path)
    assert [s.problem for s in found] == group.problems and found[0].about == {"gpu": "h100"}
    kernels = list(group.kernels.values())
    for index, one in enumerate(found):
        right = [c for c in one.configs if c.us is not None]
        assert len(right) > 2 and {c.family for c in right} <= set(group.families)
        assert any(c.state == "wrong: as planned" for c in one.configs)
        assert any(c.again for c in right) and one.best == min(c.us for c in right)
        for config in right:
            kernel = next(k for k in kernels if k.family == config.family and k.params == config.params)
            assert config.us == pytest.approx(kernel.times[index], rel=1e-4)
            assert config.rough == (index in kernel.rough)
            made = KernelConfig(config.family, config.params)
            assert not registry.lookup(config.family).why_invalid(one.problem, made, H100)
            assert config.device_s > 0 and (config.compile_s > 0.05 or config.compile_s == 0)


@pytest.mark.slow
def test_a_recording_goes_on_from_an_earlier_one(tmp_path):
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    for path, earlier in ((first, []), (second, [first])):
        group = next(g for g in make_groups(H100, most=2) if g.name == "fp32 d64 full")
        landscapes.go_on_from([group], earlier)
        before = set(group.kernels)
        assert group.spent == len(before) and bool(before) == bool(earlier)
        record = landscapes.Record(path, {"gpu": "h100"}, [group], H100)
        make = landscapes.Surveyor
        with Engine(
            [group], H100, jobs=2, seed=len(before), stage=PuppetStage, sample=99, most=99, breeder=make
        ) as engine:
            landscapes.survey(engine, record, 8)
    one, two, both = landscape.load(first)[0], landscape.load(second)[0], landscape.load(first, second)[0]
    names = [{KernelConfig(c.family, c.params).id for c in land.configs} for land in (one, two, both)]
    assert names[0] and names[1] and not names[0] & names[1] and names[2] == names[0] | names[1]
    assert both.problem == one.problem == two.problem and len({c.number for c in both.configs}) == len(both.configs)


def test_a_file_that_was_cut_short_is_whole_up_to_its_last_member(tmp_path):
    path = tmp_path / "l.jsonl.gz"
    landscape.append(path, [{"a": 1}, {"a": 2}])
    whole = path.stat().st_size
    landscape.append(path, [{"a": 3}])
    assert landscape.read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    path.write_bytes(path.read_bytes()[: whole + 9])
    assert landscape.read_rows(path) == [{"a": 1}, {"a": 2}]
