"""append_kv: new keys and values in caches and rotary embeddings, right on the interpreter, and wrong where it is."""

import pytest

from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import ProblemError
from evoattn.model.shape_text import parse_shape
from tests.families.on_interpreter import built, small_faults

L4, FAMILY = GPUS["l4"], FAMILIES["append_kv"]
STARTS = load_space("append_kv", L4).starting_configs()


def kernel_of(text, config, *edits):
    problem = parse_shape(f"B=2,H=4,Hkv=2,Sq=5,Sk=99,{text}")
    assert FAMILY.why_impossible(problem, config, L4) is None
    return built(FAMILY, problem, config, L4, *edits), problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("D=64,dtype=bf16,op=append_halves,seqused=0:90,page=16,mask=causal_lower_right", 0),
        ("D=64,dtype=fp16,op=append_pairs,scale=0.5,layout=bshd", 1),
        ("D=72,Dv=40,dtype=fp16,op=append,seqused=0:90,page=1", 0),
        ("D=80,dtype=fp32,op=append_halves,scale=0.25", 3),
    ],
)
def test_right_on_the_interpreter(text, start):
    assert small_faults(*kernel_of(text, STARTS[start])) == []


PAGED = "D=32,dtype=bf16,op=append_halves,seqused=0:90,page=8,mask=causal_lower_right"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("position >= room", "position > room", "bytes"),
        ("at < 0 || at >= pages", "at >= pages", "bytes"),
        ("MOVES ? position : used", "used", "largest error"),
        ("__fsub_rn(", "__fadd_rn(", "largest error"),
        ("used + row", "row", "not the kernel's to write"),
    ],
)
def test_a_fault_is_found(right, wrong, said):
    found = small_faults(*kernel_of(PAGED, STARTS[1], (right, wrong)))
    assert found and said in " ".join(found), found


def test_what_it_is_not_for():
    with pytest.raises(ProblemError, match="share of columns"):
        parse_shape("B=1,H=2,S=50,D=16,op=append_pairs,seqused=0:9,scale=1.5")
    windowed = parse_shape("B=1,H=2,S=50,D=16,op=append,seqused=0:9,window=9:0")
    assert "window" in (FAMILY.why_unsupported(windowed, L4) or "")
    narrow = parse_shape("B=1,H=2,S=50,D=24,op=append_halves,seqused=0:9")
    assert "divide the columns that turn" in (FAMILY.why_invalid(narrow, STARTS[0], L4) or "")
