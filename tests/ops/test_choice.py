"""Where the picked kernel cannot serve a call as its tensors lie, the next one that can is taken. What the shipped
portfolio picks can be launched by the op: kernels of drawn problems of each kind, of any family; backward passes as
calls have them: every buffer of their launches has its place."""

import dataclasses

import pytest
import torch

import evoattn
from evoattn.backends.loaded import SCRATCH, TERMS, LoadedKernel, scratch_places, tensor_places
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.ops.call import Call, StridedProblem, strided
from evoattn.ops.choice import Choice, Refusal, choose
from evoattn.ops.gradients import expected
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.pick import next_picks, pick
from evoattn.portfolio.workload import DRAWS, PLAIN, WIDE
from tests.ops.fake_device import (
    WGMMA,
    CacheDevice,
    FakeDevice,
    Pick,
    build,
    fake_runtime,
    near,
    split_kv_pick,
    tensors,
)
from tests.ops.stand_in import stand_in

GPU = GPUS["h100"]
ASKED = StridedProblem(1, 2, 2, 64, 64, 64, "bf16", op="backward")
APART = 8
"""Elements between batches of keys beside whole rows: tensor maps of keys in use cannot step over them."""


def wgmma(problem, gpu):
    return Pick("flash_wgmma", load_space("flash_wgmma", gpu).make_config(WGMMA))


def both(problem, gpu):
    return [wgmma(problem, gpu), split_kv_pick(problem, gpu)]


def cache_call(batch=3, keys=70, dim=64):
    """Query, key, value and keys in use, K and V with APART elements between batches."""
    made = torch.Generator().manual_seed(4)
    q = torch.randn(batch, 4, 2, dim, generator=made).half()
    step = 2 * keys * dim + APART
    k, v = (
        torch.randn(batch * step, generator=made).half().as_strided((batch, 2, keys, dim), (step, keys * dim, dim, 1))
        for _ in "kv"
    )
    return q, k, v, torch.tensor([keys, 31, 1], dtype=torch.int32)


def attend(strict=False):
    q, k, v, used = cache_call()
    return evoattn.attention(q, k, v, enable_gqa=True, seqused_k=used, strict=strict)


def test_the_next_kernel_that_can_serve_the_strides_runs(tmp_path):
    device = CacheDevice()
    expected = attend()
    with current.use(Runtime(device, wgmma, tmp_path, build, both)):
        assert near(attend(strict=True), expected)
        q, k, v, used = cache_call()
        said = evoattn.explain(q, k, v, enable_gqa=True, seqused_k=used)
    assert said.startswith("split_kv ") and "flash_wgmma" in said and "whole rows apart" in said
    assert device.launches


@pytest.mark.parametrize("others", [None, lambda problem, gpu: [], lambda problem, gpu: [wgmma(problem, gpu)]])
def test_where_none_can_the_first_ones_reason_is_told(tmp_path, others):
    said = pytest.raises(NoKernel, match=r"flash_wgmma .* cannot serve this call: .* whole rows apart")
    with current.use(Runtime(CacheDevice(), wgmma, tmp_path, build, others)), said:
        attend(strict=True)


def strided_cache(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim):
    """What the op asks for a cache as in `cache_call`."""
    sizes = batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim
    problem = AttentionProblem(*sizes, seqused=f"0:{seqlen_k}")
    strides = tuple(problem.strides(t) for t in "qkvo")
    apart = tuple((s[0] + APART, *s[1:]) if i in (1, 2) else s for i, s in enumerate(strides))
    return StridedProblem(**problem.to_dict(), strides_of=apart)


def test_an_estimated_kernel_is_taken_where_these_are_allowed_alone():
    problem = strided_cache(3, 4, 2, 2, 70, 64)

    def guesses(problem, gpu):
        return [dataclasses.replace(other, estimated=True) for other in both(problem, gpu)]

    assert isinstance(choose(problem, GPU, wgmma, False, guesses), Refusal)
    allowed = choose(problem, GPU, wgmma, True, guesses)
    assert isinstance(allowed, Choice) and allowed.family.name == "split_kv"


def test_others_that_fail_cost_a_warning():
    def fails(problem, gpu):
        raise ValueError("the portfolio is damaged")

    with pytest.warns(RuntimeWarning, match="the portfolio is damaged"):
        assert isinstance(choose(strided_cache(3, 4, 2, 2, 70, 64), GPU, wgmma, False, fails), Refusal)


def test_the_portfolio_has_a_kernel_for_such_strides():
    """Of 64 queries over a cache: its first kernels are flash_wgmma's, and the others of the class need no tensor
    maps."""
    problem = strided_cache(4, 32, 8, 64, 4096, 128)
    first = pick(problem.as_searched, GPU)
    assert first.family == "flash_wgmma"
    assert isinstance(choose(problem, GPU, pick, True), Refusal)
    chosen = choose(problem, GPU, pick, True, next_picks)
    assert isinstance(chosen, Choice) and chosen.family.name == "split_kv"
    able = [other for other in next_picks(problem.as_searched, GPU) if other.family == "split_kv"]
    assert chosen.config == able[0].config, "the most promising one"
    assert all(other.estimated == first.estimated for other in able)


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
        assert changed and all(isinstance(one, Scalar) for one, _ in changed), "the scale alone"
        places, scratch, zeroed = scratch_places(choice.family.workspace(choice.problem, choice.config, choice.gpu))
        assert all(0 <= offset < (scratch, zeroed)[index - SCRATCH] for index, offset in places.values())
        places |= tensor_places(problem)
        cubin = build(choice.family, problem, choice.config, choice.gpu, tmp_path)
        for packed in LoadedKernel(cubin.code, device, -1).bound(scaled, places):
            packed.binding.bind(ADDRESSES)
    assert SERVED_BY.get(kind, {"flash_wgmma", "split_kv"}) <= families


@pytest.mark.parametrize("op", ["", "op=backward "])
def test_a_scale_that_is_given_beside_a_softcap_changes_the_score_below_the_cap(op):
    problem = parse_shape(f"{op}B=1 H=2 S=64 D=64 fp16 softcap=5")
    choice = choose(strided(problem), GPUS["h100"], pick, estimated=False)
    assert choice.launches(0.125) == choice.launches(None), "1 / sqrt(64), as transformers says it"
    scaled = dataclasses.replace(choice, problem=dataclasses.replace(choice.problem, scale=0.5))
    assert choice.launches(0.5) == scaled.launches(None) != choice.launches(None)


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


def test_what_has_a_kernel_of_its_own():
    """Another card of another architecture, gradients of other terms, and sums in a fixed order; not other lengths."""
    config, problem = load_space("backward_mma", GPU).starting_configs()[0], ASKED
    one = Choice(FAMILIES["backward_mma"], config, problem, GPU, "")
    longer = dataclasses.replace(problem, seqlen_q=999, seqlen_k=999)
    others = [{"deterministic": True}, {"bias": "hs", "grads": "bias"}, {"bias": "hs"}, {"mask": "causal_upper_left"}]
    problems = [longer, *(dataclasses.replace(problem, **words) for words in others)]
    made = [dataclasses.replace(one, problem=of) for of in problems] + [dataclasses.replace(one, gpu=GPUS["a100"])]
    assert one.key == made[0].key and len({choice.key for choice in (one, *made)}) == 6
