"""Traced functions in kernels, printed and run on the interpreter over the caller's own tensors and lists."""

from dataclasses import replace

import pytest
import torch

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.backends.interpreter import InterpreterBackend
from evoattn.backends.loaded import own_tables
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.ops import flex
from evoattn.ops.arguments import BIAS, SLOPES
from evoattn.ops.call import Call
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
from tests.families.on_interpreter import built
from tests.ops.fake_device import tensors
from tests.ops.test_flex_mods import by_torch

H100 = GPUS["h100"]
GENES = {
    "flash_mma": test_flash_mma.BASE,
    "flash_wgmma": {**test_flash_wgmma.BASE, "BLOCK_N": 64, "RESCALE": "lazy_5"},
    "split_kv": test_split_kv.BASE,
}
LISTED = ("flash_mma", "flash_wgmma")
SHAPE = Shape(2, 2, 77, 131)
FEW = Shape(2, 4, 3, 131)
NAMES = (
    *("windows_of_heads", "documents_by_offsets", "logical_documents", "global_window", "neighbours_2d", "jagged"),
    *("pictures_for_text", "tree_of_bits", "any_pairs", "chosen_blocks", "chosen_causal_blocks", "block_diffusion"),
    *("t5_bias", "bias_from_the_end", "activation", "alibi_by_slopes", "causal_softcap_in_window"),
)


def interpreted(family_name: str, call: Call, expected: tuple[torch.Tensor, torch.Tensor]) -> str:
    """What is wrong with a kernel's answer to a call; empty if nothing is."""
    call = replace(call, return_lse=family_name == "flash_wgmma")  # which alone gives it
    out = torch.full(call.query.shape, float("nan"), dtype=call.query.dtype)
    made = call.problem(out.stride())
    assert not isinstance(made, str), made
    family, problem = FAMILIES[family_name], made.as_searched
    config = load_space(family_name, H100).make_config(GENES[family_name])
    assert family.why_impossible(problem, config, H100) is None
    kernel = built(family, problem, config, H100)
    buffers = {"q": call.query, "k": call.key, "v": call.value, "o": out}
    buffers["lse"] = torch.full(out.shape[:3], float("nan"))
    buffers |= {n: t.contiguous() for n, t in zip(own_tables(problem), call.terms[-len(own_tables(problem)) :])}
    named = {"slopes": call.term(SLOPES), "bias": call.term(BIAS)}
    buffers |= {name: term for name, term in named.items() if term is not None}
    for name, size in family.workspace(problem, config, H100).items():
        buffers[name] = torch.zeros(size, dtype=torch.uint8)
    launches = family.launches(problem, config, H100)
    if faults := InterpreterBackend().run(kernel.compiled, launches, buffers):
        return faults[0]
    for name, exact, far in (("o", expected[0], 4e-3), ("lse", expected[1], 2e-3))[: 1 + call.return_lse]:
        found = buffers[name].double()
        if not torch.allclose(found, exact, atol=far, rtol=far):
            return f"{name} is {(found - exact).abs().max().item()} off"
    return ""


def made_of(shape: Shape, written: Written, block: int) -> tuple[list[Call], tuple[torch.Tensor, torch.Tensor]]:
    """The calls that answer, and torch's answer in float64."""
    q, k, v = tensors(shape.batch, shape.heads, 2, shape.queries, shape.keys, dtype=torch.float16)
    mask = written.block_mask(shape, block)
    call = Call(q, k, v, enable_gqa=True, return_lse=True, strict=True)
    made = flex.calls(call, written.score_mod, mask)
    assert not isinstance(made, str), made
    return [make() for make in made], by_torch(call, written.score_mod, mask)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", LISTED)
@pytest.mark.sampled(4)
def test_a_kernel_gives_what_torch_gives(family, name):
    calls, expected = made_of(SHAPE, MODS[name](SHAPE), 64)
    assert calls[0].blocks or calls[0].causal or MODS[name](SHAPE).block_mask(SHAPE) is None
    assert not interpreted(family, calls[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("tree", "documents_of_batches", "chosen_blocks", "decoding", "alibi_by_slopes"))
def test_few_queries_over_split_keys(name):
    calls, expected = made_of(FEW, MODS[name](FEW), 64)
    assert not interpreted("split_kv", calls[0], expected)


@pytest.mark.slow
def test_nan_behind_the_mask_and_rows_without_keys():
    nan = torch.where(torch.arange(131) < 100, 0.5, float("nan"))
    written = Written(lambda s, b, h, q, k: s + nan[k], lambda b, h, q, k: (k < 100) & (q > 9) & (q < 64))
    calls, expected = made_of(SHAPE, written, 64)
    assert calls[0].blocks and expected[1].isneginf().any() and not expected[0].isnan().any()
    assert (expected[0][:, :, 64:] == 0).all()
    for family in LISTED:
        assert not interpreted(family, calls[0], expected)
