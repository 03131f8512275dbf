"""A campaign's plan: made and compiled without a GPU, then timed while no other kernel waits for the GPU."""

from __future__ import annotations

import shutil

import pytest

from evoattn.backends.compiler import version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.groups import Group
from evoattn.engine.planned import Ahead
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Surveyed
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio import campaign
from evoattn.portfolio.measure import KERNELS, PLAN, Wanted, compile_ahead, load_plan, measure, plan, save_plan
from evoattn.portfolio.proposals import ClimbingBreeder

H100 = GPUS["h100"]
SHAPES = ("B=4,H=8,S=512,D=64,dtype=bf16,mask=full", "B=8,H=8,Sq=1,Sk=900,D=64,dtype=bf16,mask=full")


def made():
    problems = [parse_shape(s) for s in SHAPES]
    group = Group("16 d64 full", problems, campaign.families_of(problems, H100))
    return plan([group], H100)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """A plan of two problems whose first kernels are compiled."""
    folder = tmp_path_factory.mktemp("ahead")
    planned, files = made(), KernelFiles(folder / KERNELS, version())
    assert len(list(compile_ahead(iter(planned[:3]), files, H100, 60, 2))) == 3
    save_plan(folder / PLAN, planned)
    return folder


@pytest.fixture
def folder(made_once, tmp_path):
    """A copy of the plan, which a test may change."""
    return shutil.copytree(made_once, tmp_path / "ahead")


@pytest.mark.slow
def test_a_plan_begins_with_the_pick_of_every_problem():
    planned = made()
    assert [(one.target, one.origin) for one in planned[:2]] == [(0, "given"), (1, "given")]
    assert len({one.kernel().id for one in planned}) == len(planned)


@pytest.mark.slow
def test_a_plan_is_read_as_it_was_written(folder):
    groups, planned = load_plan(folder / PLAN)
    assert [(p.with_(name=""), g.weight) for g in groups for p in g.problems] == [
        (parse_shape(shape), 2) for shape in SHAPES
    ]
    assert [vars(one.kernel()) for one in planned] == [vars(one.kernel()) for one in made()]


@pytest.mark.slow
def test_what_has_no_machine_code_is_what_a_breeder_proposes_first(folder):
    (group,), planned = load_plan(folder / PLAN)
    files = KernelFiles(folder / KERNELS, version())
    ahead = Ahead(planned, files, H100)
    assert list(group.kernels) == [one.kernel().id for one in planned[:3]] and ahead.left == 3
    found, kernel, candidate, compiled = ahead.next()
    assert found is planned[0] and kernel is group.kernels[kernel.id] and files.get(candidate) == compiled
    files._path(planned[1].candidate(H100)).write_bytes(b"damaged")
    assert ahead.next()[0] is planned[2] and not ahead.next()
    breeder = ClimbingBreeder(group, H100, 0)
    breeder._target = 1
    steps = [breeder._next_step() for _ in range(3)]
    assert [(one.kernel().config, one.origin) for one in planned[3:] if one.target == 1][:3] == steps


class FakeDevice(Handler):
    """Answers as the GPU process does, without a GPU."""

    def __init__(self, problem, gpu, cache):
        pass

    def __call__(self, task):
        return Surveyed(((9.0, False),) * len(task.problems))


@pytest.mark.slow
def test_a_campaign_times_what_was_compiled_ahead_and_goes_on(folder, tmp_path):
    wanted = Wanted(tmp_path / "out.jsonl.gz", seconds=6, ahead=folder, jobs=1)
    device = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")
    said: list[str] = []
    measure(wanted, device, said.append, Tools(make_device=FakeDevice))
    assert said[0] == f"3 of {len(made())} planned kernels are compiled"
    assert said[1].split()[1] == "groups,"
    about, (group,), tables = campaign.load(tmp_path / "out.jsonl.gz")
    right = {k.id for k in group.kernels.values() if k.state == "right" and k.times}
    assert {one.kernel().id for one in made()[:3]} <= right, "no compile process waited for these"
    assert len(right) > 3 and about["compiled"] >= len(right) - 3 and not tables
    assert [p.describe() for p in group.problems] == [parse_shape(shape).describe() for shape in SHAPES]
