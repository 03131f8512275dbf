"""Variants of attention: which lengths and strides families take, how many tiles packed sequences have, and expressions
of scores in kernels."""

from dataclasses import asdict, dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.cases import make_case
from evoattn.correctness.validate import check
from evoattn.families.dealt import row_blocks
from evoattn.families.given import passed
from evoattn.families.registry import FAMILIES, load_space, lookup
from evoattn.families.variants import variant_given
from evoattn.families.work import row_steps
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.sequences import starts
from tests.families import test_flash_mma, test_flash_wgmma, test_split_kv
from tests.families.on_interpreter import built, small_faults

H100 = GPUS["h100"]
PLAIN = AttentionProblem(1, 2, 1, 512, 512, 64, "bf16")
IN_USE = PLAIN.with_(seqused="0:500", dtype="fp16")
EXPRESSIONS = {
    "terms by heads and distances, sink": PLAIN.with_(
        score="s+table[h,k-q+40]*gate[b,h]+(k-q-d)//9/4", tables="table:fp32:2x97+gate:fp16:2x2", sink=True, scale=0.2
    ),
    "all functions": PLAIN.with_(
        score="s+sin(k/7)*cos(q/5)+pow(1+abs(s),0.5)*erf(gate[h])+floor(k/3)/64-whole(q/2)/64"
        "+((k>>2)+(1<<b)+bitand(q,3))/16+where(seen[k],bias[wrap(k-q)],far[q]/4)",
        tables="gate:fp32:2+seen:bool:300+bias:bf16:70+far:int64:9",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", [test_flash_mma, test_flash_wgmma, test_split_kv], ids=lambda m: m.FAMILY.name)
@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.sampled(2)
def test_expressions_are_right_in_kernels(module, name):
    problem = EXPRESSIONS[name]
    config = load_space(module.FAMILY.name, H100).make_config(module.BASE | {"BLOCK_N": 64})
    assert small_faults(built(module.FAMILY, problem, config, H100), problem, slice(0, None, 3)) == []


@dataclass(frozen=True)
class Strided(AttentionProblem):
    """A problem whose K and V have strides of their own."""

    own: tuple[tuple[str, tuple[int, int, int, int]], ...] = ()

    def strides(self, tensor):
        return dict(self.own).get(tensor) or super().strides(tensor)


@pytest.mark.parametrize(
    ("strides", "reason"),
    [
        ({"k": (1024 * 64, 64, 64, 1), "v": (1024 * 64, 64, 64, 1)}, None),
        ({"k": (1024 * 64, 64, 64, 1)}, "as many rows apart"),
        ({"k": (1024 * 64 + 8, 64, 64, 1), "v": (1024 * 64 + 8, 64, 64, 1)}, "whole rows apart"),
        ({"k": (1 << 37, 64, 64, 1), "v": (1 << 37, 64, 64, 1)}, "an int32 counts"),
        ({"k": (64, 64, 128, 1), "v": (64, 64, 128, 1)}, None),  # of one key: as the op's `plain_strides` says
    ],
)
def test_flash_wgmma_takes_batches_that_are_whole_rows_apart(strides, reason):
    one_key = strides["k"][0] == 64
    fields = asdict(IN_USE.with_(batch=2, **({"seqlen_k": 1, "seqused": "0:1"} if one_key else {})))
    problem = Strided(**fields, own=tuple(strides.items()))
    told = FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"])
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize(
    ("rows", "variant", "taken"),
    [
        (1 << 30, {"seqused": "0:500"}, True),
        ((1 << 30) + 1, {"seqused": "0:500"}, False),
        ((1 << 30) + 1, {"seqused": "0:500", "page": 64}, True),
        ((1 << 30) + 1, {"varlen": "300"}, False),
    ],
)
def test_flash_wgmma_takes_sequences_that_its_tensor_maps_can_count(rows, variant, taken):
    problem = PLAIN.with_(batch=1, heads=1, kv_heads=1, head_dim=16, seqlen_k=rows, **variant)
    told = FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"])
    assert told is None if taken else "rows of one" in told


def test_one_batch_may_have_more_rows_than_an_int32_counts():
    own = dict.fromkeys("kv", (1 << 40, 64, 64, 1))
    problem = Strided(**asdict(IN_USE.with_(batch=1)), own=tuple(own.items()))
    assert FAMILIES["flash_wgmma"].why_unsupported(problem, GPUS["h100"]) is None
    counts = [arg.value for arg in passed(variant_given(problem)) if getattr(arg, "ctype", "") == "int32"]
    assert all(-(1 << 31) <= count < 1 << 31 for count in counts)


def test_a_merge_without_rows_ends_after_the_launch_before_it():
    """As in a graph that serves no sequence this time: lengths are on the device, and all are 0."""
    family, problem = lookup("split_kv"), PLAIN.with_(batch=2, seqlen_q=1, varlen="1+1/100+512", head_dim=16)
    genes = test_split_kv.config(MERGE="kernel").params | {"DEPENDENT_LAUNCH": "early"}
    early = load_space("split_kv", H100).make_config(genes)
    case = make_case("no sequence", problem, 1, "cpu", double=True)
    case.tensors["cu_seqlens_q"].zero_()
    assert "griddepcontrol" not in check(InterpreterBackend(), built(family, problem, early, H100), case).reason


@pytest.mark.slow
@given(st.lists(st.integers(0, 300), min_size=1, max_size=9).filter(any), st.sampled_from((16, 64, 192)))
def test_there_are_slots_for_every_tile_and_few_more(lengths, rows):
    """As `sequences.cuh` counts them."""
    problem = AttentionProblem(len(lengths), 1, 1, 300, 300, 64, varlen="+".join(map(str, lengths)))
    first = [start // rows + i for i, start in enumerate(starts(tuple(lengths)))]
    tiles = [-(-length // rows) for length in lengths]
    assert row_blocks(problem, rows) == first[-1]
    assert all(count <= end - begin <= count + 1 for begin, end, count in zip(first, first[1:], tiles, strict=False))


def test_steps_are_those_of_the_sequences():
    problem = AttentionProblem(3, 1, 1, 300, 300, 64, "fp16", "causal_lower_right", varlen="200+0+100")
    assert row_steps(problem, 100, 50) == ((2 + 4 + 2) / 3, 4, 3)
    assert row_steps(problem.with_(mask="full"), 100, 50) == ((4 + 4 + 2) / 3, 4, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "edit"),
    [
        *(("flash_mma", None), ("split_kv", None)),
        ("flash_mma", ("[sequence] - query_starts[0]", "[sequence] + query_starts[0]")),
    ],
)
def test_rows_in_front_of_the_first_sequence_are_nobody_s(family, edit):
    """As of a batch of an engine of which a call takes the later sequences."""
    whole = AttentionProblem(3, 2, 1, 40, 70, 64, "fp16", "causal_lower_right", "bshd", varlen="37+5+40/20+70+33")
    later, gpu = whole.with_(batch=2, varlen="5+40/70+33"), H100
    configs = load_space(family, gpu).starting_configs()
    config = next(one for one in configs if FAMILIES[family].why_invalid(later, one, gpu) is None)
    kernel, case = (
        built(FAMILIES[family], later, config, gpu, *[edit] * bool(edit)),
        make_case("plain", whole, 1, "cpu"),
    )
    rows = {name: t.transpose(1, 2).contiguous() for name, t in case.tensors.items() if t.dim() == 4}
    begins = {name: t[1:].clone() for name, t in case.tensors.items() if name not in rows}
    out = torch.full_like(rows["q"], torch.nan)
    scratch = {name: torch.zeros(count, dtype=torch.uint8) for name, count in kernel.workspace(later).items()}
    faults = InterpreterBackend().run(kernel.compiled, kernel.launches(later), rows | begins | {"o": out} | scratch)
    exact = case.answer["o"]
    off = (out - exact.values.transpose(1, 2))[:, 37:].abs().max()
    assert out[:, :37].isnan().all() or edit
    assert (not faults and off <= exact.allowed_error) == (edit is None)
