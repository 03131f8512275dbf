"""What the shipped portfolio picks can be launched by the op: kernels of drawn problems of each kind, of any
family; backward passes as calls have them: every buffer of their launches has its place."""

import pytest
import torch

import evoattn
from evoattn.backends.loaded import SCRATCH, TERMS, LoadedKernel, scratch_places, tensor_places
from evoattn.families.base import SOFTMAX_SCALE_LOG2
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, TensorMap
from evoattn.ops.call import Call, StridedProblem, strided
from evoattn.ops.choice import Choice, Refusal, choose
from evoattn.ops.gradients import expected
from evoattn.ops.runtime import current
from evoattn.portfolio.pick import pick
from evoattn.portfolio.workload import DRAWS, PLAIN, WIDE
from tests.ops.fake_device import FakeDevice, build, fake_runtime, tensors
from tests.ops.stand_in import stand_in

SEED, COUNT = 4711, 30
ADDRESSES = tuple(4096 << i for i in range(SCRATCH + 3 + len(TERMS)))
SERVED_BY = {
    "latent_paged": {"latent_wgmma"},
    PLAIN: {"flash_wgmma", "split_kv"},
    WIDE: {"large_head_mma"},
    "latent": {"flash_wgmma", "latent_wgmma"},
    "packed": {"flash_wgmma"},
    "eight_bits": {"split_kv"},
    "eight_bit_chunks": {"flash_mma"},
    "fp8": {"fp8_wgmma"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.sampled(4)
def test_every_pick_can_be_packed_and_takes_the_callers_scale(kind, tmp_path):
    device, families = FakeDevice(), set()
    for problem in DRAWS[kind](SEED, COUNT):
        choice = choose(strided(problem), GPUS["h100"], pick, estimated=False)
        if kind == WIDE and problem.dtype == "fp32" and isinstance(choice, Refusal):
            assert "no portfolio has" in choice.reason, "PyTorch is faster there"
            continue
        assert isinstance(choice, Choice), choice.reason
        families.add(choice.family.name)
        scaled, usual = choice.launches(0.5), choice.launches(None)
        changed = [
            (mine, theirs)
            for one, other in zip(scaled, usual, strict=True)
            for mine, theirs in zip(one.args, other.args, strict=True)
            if mine != theirs
        ]
        assert {one.name for one, _ in changed} == {SOFTMAX_SCALE_LOG2} and len(changed) <= len(scaled), "the scale"
        places, scratch, zeroed = scratch_places(choice.family.workspace(choice.problem, choice.config, choice.gpu))
        assert all(0 <= offset < (scratch, zeroed)[index - SCRATCH] for index, offset in places.values())
        places |= tensor_places(problem)
        cubin = build(choice.family, problem, choice.config, choice.gpu, tmp_path)
        for packed in LoadedKernel(cubin.code, device, -1).bound(scaled, places):
            packed.bind(ADDRESSES)
    assert SERVED_BY.get(kind, {"flash_wgmma", "split_kv"}) <= families


def test_a_latent_cache_in_pages_has_a_kernel_that_was_measured(tmp_path):
    asked = []

    def recorded(problem, gpu):
        asked.append((problem, pick(problem, gpu)))

    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 1, 16, 576, generator=generator).bfloat16()
    cache = torch.randn(5, 64, 1, 576, generator=generator).bfloat16()
    table, used = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32), torch.tensor([70, 128], dtype=torch.int32)
    with current.use(fake_runtime(FakeDevice(), tmp_path, recorded)):
        answer = evoattn.attention_paged(query, cache, cache[..., :512], table, used)
    for row, pages, keys in zip(range(2), table.tolist(), used.tolist(), strict=True):
        latent = cache[pages].reshape(1, 128, 576)[:, :keys].float()
        alone = query[row].transpose(0, 1).float()
        expected = torch.nn.functional.scaled_dot_product_attention(alone, latent, latent[..., :512])
        assert torch.allclose(answer[row].transpose(0, 1).float(), expected, atol=2e-2)
    (problem, found), *_ = asked
    assert problem.shared_kv and problem.page == 64 and (problem.head_dim, problem.head_dim_v) == (576, 512)
    assert found.family == "latent_wgmma" and not found.estimated


H100 = GPUS["h100"]
CALLS = {
    "plain": {},
    "lse": {"return_lse": True},
    "causal": {"mask": "causal_lower_right", "window": (9, -1)},
    "scale": {"scale": 0.3},
    "sinks": {"terms": (torch.ones(4).half().requires_grad_(), *[None] * 6)},
    "bias": {"terms": (None, None, torch.ones(1, 4, 1, 45).half().requires_grad_(), *[None] * 4)},
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", list(CALLS))
def test_every_buffer_has_its_place(name, layout):
    call = Call(*tensors(layout=layout), enable_gqa=True, **CALLS[name])
    problem = expected(call).problem()
    assert isinstance(problem, StridedProblem)
    assert problem.strides("do") == problem.strides("o") and problem.strides("dk") == call.key.stride()
    assert problem.grads == (name if name in ("sinks", "bias") else "") and problem.lse == (name == "lse")
    picked = stand_in(problem.as_searched, H100)
    family, config = FAMILIES[picked.family], picked.config
    assert not family.why_impossible(problem, config, H100)
    places = tensor_places(problem) | scratch_places(family.workspace(problem, config, H100))[0]
    for launch in Choice(family, config, problem, H100, "").launches(None):
        for argument in launch.args:
            if isinstance(argument, Buffer | TensorMap):
                assert (argument.name if isinstance(argument, Buffer) else argument.buffer) in places
