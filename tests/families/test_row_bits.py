"""Rows of the same bits in every batch: what a family promises of a recipe holds on the interpreter, for a row alone
and among others; and a kernel that breaks the promise is found."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import Case
from evoattn.correctness.validate import make_arena
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio.pick import pick
from evoattn.samplers.base import ConfigPool
from evoattn.search.spaces import choose_spaces
from tests.families.on_interpreter import Edit, built, judged

KEYS, ALONE, CHUNKS = 270, ((64, 1), (131, 5), (269, 1), (269, 5)), ((0, 70), (120, 165))
"""Of a causal sequence, and those of its queries that are computed in other surroundings, too: a row alone so many
times, rows from the first to the second."""
Answer = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def sums_do_not_depend_on_shapes(monkeypatch):
    """NumPy's products of float32 may have other last bits in matrices of another shape, by the CPU: the interpreter's
    are made in double precision here, which holds sums of 16 products of 16 bits."""
    multiply = np.matmul

    def exact(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        product = multiply(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
        if out is None:
            return product
        np.copyto(out, product)
        return out

    monkeypatch.setattr(np, "matmul", exact)


def causal(**fields: Any) -> AttentionProblem:
    own = {"head_dim": 64, "mask": "causal_lower_right", "batch_invariant": True}
    return AttentionProblem(
        **{"batch": 1, "heads": 2, "kv_heads": 1, "seqlen_q": KEYS, "seqlen_k": KEYS, **own, **fields}
    )


def tensors_of(problem: AttentionProblem) -> tuple[torch.Tensor, ...]:
    """q, k and v of a causal sequence. Of each part of the keys later ones have the higher scores for some queries and
    the lower ones for others, so that shifts rise at many places."""
    made = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(problem.shape(x), generator=made) for x in "qkv")
    q *= torch.randint(1, 9, (1, 2, KEYS, 1), generator=made)
    q[..., 1:] /= 4  # so that a row sees several keys
    k[..., 0] += torch.arange(KEYS) % 128 * 0.45 - 30
    return tuple(one.to(getattr(torch, problem.element.torch)) for one in (q, k, v))


def computed(kernel: BuiltKernel, problem: AttentionProblem, **tensors: torch.Tensor) -> Answer:
    """The answer, and the log-sum-exp if the problem asks for it, by the interpreter."""
    arena = make_arena(Case("", problem, tensors, {}), kernel.workspace(problem), torch.device("cpu"))
    arena.arm()
    faults = InterpreterBackend().run(kernel.compiled, kernel.launches(problem), arena.buffers)
    assert not faults, faults[0]
    out = {name: one.clone() for name, one in arena.outputs.items()}
    return out["o"], out.get("lse", torch.zeros(out["o"].shape[:3]))


def compared(many: BuiltKernel, one: BuiltKernel, whole: AttentionProblem) -> Iterator[str]:
    """Where rows have other bits than in a causal sequence by `many`: alone, as decoding asks for them, by `one`; at
    some place of a chunk; and in a batch with another sequence."""
    q, k, v = tensors_of(whole)
    expected = computed(many, whole, q=q, k=k, v=v)

    def differs(row: int, answer: Answer, at: int) -> bool:
        return any(not torch.equal(was[0, :, row], now[-1, :, at]) for was, now in zip(expected, answer, strict=True))

    def of(first: int, end: int) -> dict[str, torch.Tensor]:
        return {"q": q[:, :, first:end].contiguous(), "k": k[:, :, :end].contiguous(), "v": v[:, :, :end].contiguous()}

    for row, queries in ALONE:  # so many times the same query
        decoding, tensors = whole.with_(seqlen_q=queries, seqlen_k=row + 1, mask="full"), of(row, row + 1)
        answer = computed(one, decoding, **tensors | {"q": tensors["q"].repeat(1, 1, queries, 1)})
        if differs(row, answer, queries - 1):
            yield f"alone: row {row}"
    for first, end in CHUNKS:
        answer = computed(many, whole.with_(seqlen_q=end - first, seqlen_k=end), **of(first, end))
        yield from (f"chunk: row {row}" for row in range(first, end) if differs(row, answer, row - first))
    batch = [torch.cat((3 * x.flip(2), x)) for x in (q, k, v)]
    answer = computed(many, whole.with_(batch=2), **dict(zip("qkv", batch, strict=True)))
    yield from (f"batch: row {row}" for row in range(KEYS) if differs(row, answer, row))


def kernel_of(name: str, gpu: str, problem: AttentionProblem, genes: dict, *edits: Edit) -> BuiltKernel:
    """With the genes of the recipe and these."""
    family, card = registry.lookup(name), CARDS[gpu]
    base = load_space(name, card).starting_configs()[0].params
    config = KernelConfig(name, {**base, **family.recipe(problem, card), **genes})
    return built(family, problem, config, card, *edits)


def kernels(name: str, gpu: str, whole: AttentionProblem, genes: tuple[dict, dict], *edits: Edit) -> list[BuiltKernel]:
    """Of a causal sequence and of decoding."""
    problems = whole, whole.with_(seqlen_q=1, mask="full")
    return [kernel_of(name, gpu, *one, *edits) for one in zip(problems, genes, strict=True)]


CARDS = {**GPUS, "one SM": GPUS["h100"].with_limits({"sm_count": 1})}
WGMMA = dict(BLOCK_M=64, STAGES=2, BLOCKS_PER_SM=1, PRODUCER="warp", OVERLAP=True, PING_PONG=False, STORE="rows")
MANY = {**WGMMA, "BLOCK_M": 128, "PRODUCER": "warpgroup", "PING_PONG": True, "PART_TILES": 2}
SPLIT = {**WGMMA, "BLOCK_M": 8, "GROUP_ROWS": True, "KEY_SPLIT": 2, "PART_TILES": 2}
MMA = dict(BLOCK_M=64, WARPS=4, STAGES=2, SCHEDULE="split", Q_PLACE="registers", O_STORE="shared", BLOCKS_PER_SM=1)
SCALAR = dict(ROWS_PER_THREAD=1, VECTOR_WIDTH=4, KV_STAGES=1, Q_IN_REGISTERS=False, BLOCKS_PER_SM=1, UNROLL=4)
LARGE = dict(DIM_SPLIT=1, DEPENDENT_LAUNCH=False, LANES=32, Q_PLACE="shared", UNROLL=1)
CASES = {
    "flash_wgmma": ("h100", {"dtype": "bf16", "lse": True}, (MANY, SPLIT)),
    "flash_mma": ("l4", {}, ({**MMA, "RESCALE": "vote"}, {**MMA, "BLOCK_M": 16, "WARPS": 1, "SCHEDULE": "overlapped"})),
    "large_head": (
        "l4",
        {"dtype": "fp32"},
        (
            {**LARGE, "BLOCK_M": 64, "WARPS": 4, "SCORE_ROWS": 32, "SCORE_KEYS": 32, "VALUE_THREADS": 64, "STAGES": 1},
            {**LARGE, "BLOCK_M": 16, "WARPS": 2, "SCORE_ROWS": 16, "SCORE_KEYS": 16, "VALUE_THREADS": 64, "STAGES": 2},
        ),
    ),
    "flash_scalar": (
        "l4",
        {"dtype": "fp32", "head_dim": 24},
        ({**SCALAR, "BLOCK_M": 32, "P_IN_SHARED": True}, {**SCALAR, "BLOCK_M": 16, "P_IN_SHARED": False}),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_rows_have_the_same_bits_alone_and_among_others(name):
    gpu, fields, genes = CASES[name]
    whole = causal(**fields)
    assert not [*compared(*kernels(name, gpu, whole, genes), whole)]


def test_a_source_of_a_cluster_whose_first_block_adds_up_all_parts_is_outdated():
    family, card = registry.lookup("flash_wgmma"), CARDS["h100"]
    problem = parse_shape("B=1 H=4/2 Sq=1 Sk=3000 D=64 bf16 batch_invariant=1")
    base = load_space("flash_wgmma", card).starting_configs()[0].params | family.recipe(problem, card) | WGMMA
    genes = {"KEY_SPLIT": 4, "PARTS_MERGE": "cluster"}
    source = render(family, problem, KernelConfig("flash_wgmma", base | genes), card).source
    before = source.replace("OWN_TILES", "ALL_TILES")
    for own in (genes, {**genes, "PARTS_MERGE": "memory"}):
        config = KernelConfig("flash_wgmma", base | own)
        assert family.why_outdated(config, source) is None
        assert bool(family.why_outdated(config, before)) == (own is genes)


CLUSTER, AGAIN = {"PARTS_MERGE": "cluster"}, {"SCHEDULE": "claimed", "Q_IN_REGISTERS": True}
OTHERS = [
    ("h100", {"window": "70:0"}, {}, {"KEY_SPLIT": 3}),
    ("h100", {"window": "70:0", "head_dim": 128}, {}, {"KEY_SPLIT": 3}),
    ("h100", {}, {}, {**CLUSTER, "KEY_SPLIT": 4}),
    ("h100", {"head_dim": 128}, {"PART_TILES": 1}, {**CLUSTER, "KEY_SPLIT": 8, "PART_TILES": 1}),
    ("h100", {"head_dim": 96}, {}, {**CLUSTER, "KEY_SPLIT": 3}),
    ("h100", {"head_dim": 96}, {}, {**CLUSTER, "KEY_SPLIT": 3, "BLOCK_M": 64}),
    ("h100", {"dtype": "fp16"}, {}, {"KEY_SPLIT": 1, "SCHEDULE": "claimed", "Q_IN_REGISTERS": True}),
    # A tile of rows begins beside the end of another; the last has sums in global memory.
    ("one SM", {}, {**AGAIN, "BLOCK_M": 64, "PING_PONG": False, "PRODUCER": "warp"}, {}),
    ("one SM", {"head_dim": 96}, {**AGAIN, "BLOCK_M": 192, "STORE": "tensor_map"}, {}),
    ("one SM", {"head_dim": 160}, {**AGAIN, "STORE": "tensor_map"}, {}),
    ("one SM", {"head_dim": 256}, {"SCHEDULE": "claimed", "STAGES": 1, "STORE": "chunks"}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "fields", "many", "one"), OTHERS)
@pytest.mark.sampled(4)
def test_the_same_by_other_kernels(gpu, fields, many, one):
    whole = causal(**{"dtype": "bf16", "lse": True, **fields})
    assert not [*compared(*kernels("flash_wgmma", gpu, whole, ({**MANY, **many}, {**SPLIT, **one})), whole)]


@pytest.mark.parametrize(
    ("sms", "head_dim", "own"),
    [
        (5, 64, {"Q_IN_REGISTERS": True, "STORE": "tensor_map"}),
        (3, 128, {"BLOCK_M": 64, "PING_PONG": False}),
        (3, 64, {"BLOCK_M": 64, "PING_PONG": False, "OVERLAP": False}),  # lanes are back before the next product
        (4, 96, {"BLOCK_M": 64, "PING_PONG": False, "Q_IN_REGISTERS": True, "PART_TILES": 1}),  # begins ahead
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(1)
def test_blocks_that_share_parts_evenly_have_the_bits_of_one(sms, head_dim, own):
    """A block goes on with the sum of another."""
    card, family = GPUS["h100"].with_limits({"sm_count": sms}), registry.lookup("flash_wgmma")
    whole = causal(dtype="bf16", lse=True, head_dim=head_dim, mask="full")
    base = load_space("flash_wgmma", card).starting_configs()[0].params | family.recipe(whole, card) | MANY | own
    answers = []
    for genes in ({"SCHEDULE": "single", "STORE": "rows"}, {"SCHEDULE": "balanced"}):
        config = KernelConfig("flash_wgmma", base | genes)
        assert family.row_bits(whole, config) is not None
        kernel = built(family, whole, config, card)
        assert bool(kernel.workspace(whole)) == (genes["SCHEDULE"] == "balanced")
        answers.append(computed(kernel, whole, **dict(zip("qkv", tensors_of(whole), strict=True))))
    assert all(torch.equal(was, now) for was, now in zip(*answers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "genes"),
    [
        ("B=2 H=2 Sq=1 Sk=384 D=64 seqused=1:384", {"KEY_SPLIT": 6, "BLOCK_M": 8}),
        ("B=2 H=4/2 Sq=3 Sk=190 D=64 mask=causal varlen=0:3", {"KEY_SPLIT": 3, "GROUP_ROWS": True, "BLOCK_M": 8}),
        ("B=2 H=2 Sq=1 Sk=180 D=128 page=64 seqused=1:180", {"KEY_SPLIT": 3}),
    ],
)
@pytest.mark.sampled(1)
def test_a_cluster_is_right_where_some_of_its_blocks_have_no_keys(shape, genes):
    """And where its launch runs twice on the same memory."""
    family, card = registry.lookup("flash_wgmma"), CARDS["h100"]
    problem = parse_shape(f"{shape} bf16 lse=1 batch_invariant=1")
    base = load_space("flash_wgmma", card).starting_configs()[0].params | family.recipe(problem, card) | WGMMA
    config = KernelConfig("flash_wgmma", base | CLUSTER | {"PART_TILES": 1} | genes)
    assert judged(built(family, problem, config, card), problem, repeat=True).passed


SHORT = {"BLOCK_N": 48, "RESCALE": "always"}


def of_few_keys(problem: AttentionProblem, genes: dict[str, Any], gpu: str, *edits: Edit) -> Answer:
    """Of the first keys of a causal sequence, by one tile of rows a block."""
    whole = tensors_of(causal(head_dim=problem.head_dim, dtype=problem.dtype))
    tensors = {name: made[:, :, : problem.seqlen_k].contiguous() for name, made in zip("qkv", whole, strict=True)}
    one = {**WGMMA, "STAGES": 1, "PART_TILES": 0, **genes}
    return computed(kernel_of("flash_wgmma", gpu, problem, one, *edits), problem, **tensors)


@pytest.mark.parametrize(
    ("head_dim", "keys", "short", "gpu"),
    [
        (64, 41, SHORT, "h100"),
        (128, 41, SHORT, "h100"),
        (72, 110, {"KEYS_AT_ONCE": 112, "BLOCK_M": 8}, "h100"),
        (64, 80, {"KEYS_AT_ONCE": 80}, "h100"),
        (64, 101, {"KEYS_AT_ONCE": 112, "PRODUCER": "warpgroup", **AGAIN}, "one SM"),  # the next tile of rows begins
        (128, 90, {"KEYS_AT_ONCE": 96, "OVERLAP": False}, "h100"),
    ],
)
@pytest.mark.slow
@pytest.mark.sampled(2)
def test_a_short_tile_has_the_bits_of_long_ones(head_dim, keys, short, gpu):
    few = causal(dtype="fp16", lse=True, head_dim=head_dim, seqlen_q=keys, seqlen_k=keys)
    tiles = of_few_keys(few, {"BLOCK_N": 64, "RESCALE": "lazy_after"}, gpu)

    def same(*edits: Edit) -> bool:
        return all(torch.equal(x, y) for x, y in zip(tiles, of_few_keys(few, short, gpu, *edits), strict=True))

    assert same()
    recipe = registry.lookup("flash_wgmma").recipe(few, CARDS["h100"])
    assert ({name: recipe[name] for name in SHORT} == SHORT) == (keys <= 48)
    if "KEYS_AT_ONCE" in short:
        assert not same(("scale_rows(o, between);", ";")), "a row rises between the two tiles"


@pytest.mark.parametrize("more", [dict(BLOCK_M=64), dict(BLOCK_M=128, PRODUCER="warpgroup", PING_PONG=True)])
@pytest.mark.slow
def test_a_kernel_of_all_keys_at_once_is_right_for_more_keys(more):
    """As the check before a first call has them."""
    family, card = registry.lookup("flash_wgmma"), CARDS["h100"]
    few = parse_shape("B=1 H=2 S=80 D=64 bf16 lse=1 batch_invariant=1 mask=causal_lower_right")
    base = load_space("flash_wgmma", card).starting_configs()[0].params | family.recipe(few, card) | WGMMA
    config = KernelConfig("flash_wgmma", base | {"KEYS_AT_ONCE": 80, "STAGES": 1, **more})
    kernel = built(family, few, config, card)
    for kind in ("plain", "rising_maximum"):
        assert judged(kernel, few.with_(seqlen_q=150, seqlen_k=290), kind).passed


@pytest.mark.parametrize(
    ("head_dim", "edit"),
    [
        (128, (" && !is_set;", ";")),  # masked tiles raise a shift in another way
        (64, ("keep_part(of_part);", ";")),  # a part is lost
        (64, ("(Terms::MAY_HIDE || OF_PART) && !hides_keys()", "OF_PART")),  # a first tile shows all
        (64, ("return Range::LACKS_ROWS && i / 2 % 2 == 1;", "return Range::LACKS_ROWS && i / 4 % 2 == 1;")),  # keys
    ],
)
@pytest.mark.slow
def test_a_broken_promise_is_found(head_dim, edit):
    whole = causal(dtype="bf16", lse=True, head_dim=head_dim)
    assert any(compared(*kernels("flash_wgmma", "h100", whole, (MANY, SPLIT), edit), whole))


SHAPES = ["Sq=1,Sk=70", "Sq=1,Sk=50000", "S=70", "S=9000,mask=causal", "Sq=300,Sk=9000,mask=causal_lower_right"]
SHAPES += ["S=900,varlen=1:900", "Sq=1,Sk=5000,seqused=1:5000,page=16", "S=9000,mask=causal,lse=1,B=16"]


@pytest.mark.parametrize("gpu", ["h100", "l4", "a100"])
@pytest.mark.parametrize("kind", ["D=64", "D=128,dtype=bf16", "D=256,dtype=bf16"])
@pytest.mark.slow
@pytest.mark.sampled(3)
def test_all_lengths_have_one_recipe(gpu, kind):
    """But for sums of parts, which are none where all keys lie in the first part, and where one short tile has all."""
    found, sizes = set(), set()
    for shape in SHAPES:
        text = ("" if "B=" in shape else "B=2,") + f"H=16,Hkv=4,{kind},{shape},batch_invariant=1"
        if gpu != "h100" and "lse" in shape:  # flash_mma writes none
            continue
        problem, card = parse_shape(text), GPUS[gpu]
        chosen = pick(problem, card)
        assert chosen is not None, text
        family = registry.lookup(chosen.family)
        assert not family.why_impossible(problem, chosen.config, card)
        bits = dict(zip(family.recipe(problem, card), family.row_bits(problem, chosen.config), strict=True))
        tiles = bits.pop("PART_TILES", 0)
        assert not tiles or problem.seqlen_k > tiles * bits["BLOCK_N"]
        sizes |= {tiles} - {0}
        found.add((chosen.family, tuple(bits.values())))
    assert len(found) == 1 and len(sizes) <= 1


@pytest.mark.parametrize("gpu", ["h100", "l4", "b200"])
@pytest.mark.parametrize("kind", ["D=64", "D=64,dtype=fp32", "D=128,Dv=64,dtype=bf16", "D=512"])
def test_no_two_families_have_a_recipe(gpu, kind):
    problem = parse_shape(f"B=1,H=4,S=128,{kind},batch_invariant=1")
    have = [f.name for f in registry.FAMILIES.values() if f.recipe(problem, GPUS[gpu])]
    assert len(have) <= 1, have


def test_what_depends_on_others_is_refused():
    family, card = registry.lookup("flash_wgmma"), GPUS["h100"]
    problem = parse_shape("B=1,H=16,S=4096,D=64,batch_invariant=1")
    right = pick(problem, card).config
    for change in ({"RESCALE": "lazy_5"}, {"BLOCK_N": 80}, {"PART_TILES": 0}):
        config = KernelConfig("flash_wgmma", {**right.params, **change})
        assert "batch_invariant" in str(family.why_impossible(problem, config, card))
    assert "PART_TILES" in str(family.why_impossible(problem.with_(batch_invariant=False), right, card))


def test_few_rows_have_tiles_of_their_own():
    family, card = registry.lookup("flash_wgmma"), GPUS["h100"]
    problem = parse_shape("B=1,H=16,Hkv=4,Sq=2,Sk=900,D=64,batch_invariant=1")
    few = pick(problem, card).config
    assert (few["BLOCK_M"], few["STORE"]) == (8, "rows")
    many = KernelConfig("flash_wgmma", {**few.params, "BLOCK_M": 64, "GROUP_ROWS": True})
    assert "half of each lane's softmax" in str(family.why_invalid(problem, many, card))
    assert not family.why_invalid(problem.with_(seqlen_q=3), many, card)
    assert not family.why_impossible(problem.with_(seqlen_q=300), few, card), "right for any number of rows"
    assert "batch_invariant" in str(family.why_impossible(problem.with_(batch_invariant=False), few, card))
    by_map = KernelConfig("flash_wgmma", {**few.params, "STORE": "tensor_map"})
    assert "STORE=rows" in str(family.why_impossible(problem, by_map, card))
    at_once = KernelConfig("flash_wgmma", {**few.params, "KEYS_AT_ONCE": 80})
    longer = str(family.why_too_long(problem, at_once, card))  # which an export asks alone
    assert "more than those of one tile" in longer
    always = KernelConfig("flash_wgmma", {**at_once.params, "RESCALE": "always"})
    assert "KEYS_AT_ONCE" in str(family.why_impossible(problem.with_(seqlen_k=64), always, card))
    in_parts = KernelConfig("flash_wgmma", {**at_once.params, "PART_TILES": 16})
    assert "PART_TILES=0" in str(family.why_impossible(problem.with_(seqlen_k=80), in_parts, card))
    of_parts = KernelConfig("flash_wgmma", {**few.params, "KEY_SPLIT": 20})
    plain = problem.with_(seqlen_k=6000, batch_invariant=False)
    assert "PART_TILES" in str(family.why_impossible(plain, of_parts, card))
    assert not family.why_impossible(
        problem.with_(seqlen_k=80), KernelConfig("flash_wgmma", {**at_once.params, "STAGES": 1}), card
    )
    rows = next(p for p in family.space(problem.with_(batch_invariant=False), card).parameters if p.name == "BLOCK_M")
    assert 8 not in rows.values


def test_a_search_draws_from_the_recipe_alone():
    problem, card = parse_shape("B=1,H=16,S=4096,D=64,batch_invariant=1"), GPUS["h100"]
    spaces = choose_spaces((), (), True, problem, card)
    assert list(spaces) == ["flash_wgmma"] and spaces["flash_wgmma"].starting
    family = registry.lookup("flash_wgmma")

    def why_invalid(name: str, params: dict[str, Any]) -> str | None:
        return family.why_invalid(problem, KernelConfig(name, params), card)

    drawn = [ConfigPool(spaces, why_invalid, random.Random(seed)).draw() for seed in range(5)]
    assert len({found[1]["BLOCK_M"] for found in drawn if found}) > 1
