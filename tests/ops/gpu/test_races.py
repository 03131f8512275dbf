"""Races on a GPU: right answers, within their budget, and none under a capture or in compiled code."""

import dataclasses

import pytest
import torch

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.model.shape_text import parse_shape
from evoattn.ops.choice import BUDGET_US, CudaClock, Race
from evoattn.ops.runtime import Runtime, current
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import Races
from tests.ops.gpu.gpu_problems import ON_A_GPU, flags, inputs, require_right

pytestmark = ON_A_GPU
SHAPES = (
    "B=2,H=8,S=1000,D=64,dtype=fp16,mask=causal",
    "B=4,H=32,Hkv=8,Sq=1,Sk=3000,D=128,dtype=bf16,mask=full",
    "B=1,H=16,S=8192,D=128,dtype=bf16,mask=full",
)


class Recorded(CudaClock):
    """Says what each timing took of the device."""

    def __init__(self):
        self.taken = []

    def first_us(self, run):
        self.taken.append(us := super().first_us(run))
        return us

    def time_us(self, run, count):
        us = super().time_us(run, count)
        self.taken.append(us * count)
        return us


@pytest.fixture
def clock(tmp_path):
    """The clock of a runtime that takes this GPU for one that nobody measured."""
    made = Recorded()

    def guess(problem, gpu):
        found = pick(problem, gpu)
        return found and dataclasses.replace(found, estimated=True)

    runtime = Runtime(CudaPlatform(), guess, tmp_path, race=Race(Races(tmp_path / "own" / "races.jsonl"), made))
    with current.use(runtime):
        yield made


@pytest.mark.parametrize("shape", SHAPES)
def test_a_race_is_short_and_the_answer_right_whoever_wins(shape, clock):
    problem = parse_shape(shape)
    q, k, v = inputs(problem)
    require_right(problem, q, k, v, evoattn.attention(q, k, v, **flags(problem)))
    assert clock.taken and sum(clock.taken) <= BUDGET_US
    before = len(clock.taken)
    require_right(problem, q, k, v, evoattn.attention(q, k, v, **flags(problem)))
    assert len(clock.taken) == before
    assert "in a race on this card" in evoattn.explain(q, k, v, **flags(problem))


def test_a_capture_takes_pytorch_before_a_race_and_its_winner_after(clock):
    problem = parse_shape(SHAPES[0])
    q, k, v = inputs(problem)
    for raced in (False, True):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.nn.functional.scaled_dot_product_attention(q, k, v)  # what it loads at first use
            if raced:
                evoattn.attention(q, k, v, **flags(problem))
            with torch.cuda.graph(graph, stream=stream):
                out = evoattn.attention(q, k, v, **flags(problem))
        graph.replay()
        torch.cuda.synchronize()
        require_right(problem, q, k, v, out)
        assert bool(clock.taken) == raced
