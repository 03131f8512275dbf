"""Which inputs a check has, and their exact answers, stay, until a change wants them otherwise: of all operations, with
each variant, of all kinds. How far an answer may be off stays where that comes of no product in 16 bits, which
processors round otherwise."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from evoattn.correctness import backward, cases, inputs
from evoattn.correctness.cases import proof_of
from evoattn.correctness.gradients import exact_gradients
from evoattn.correctness.interpreter_cases import interpreter_cases
from evoattn.model.mask import MASKS
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.support.facts import answer, changed

PLAIN = [
    *("B=2,H=4/2,Sq=5,Sk=7,D=16", "B=1,H=2,S=6,D=16,dtype=fp32,mask=causal,layout=bshd,lse=1"),
    *(
        "B=1,H=4/2,Sq=5,Sk=9,D=16,dtype=bf16,mask=causal_lower_right,window=3:0",
        "B=1,H=2,S=6,D=16,softcap=3,sink=1,lse=1",
    ),
    *("B=1,H=2,Sq=5,Sk=9,D=16,alibi=1,mask=causal_lower_right", "B=2,H=2,Sq=3,Sk=8,D=16,bias=bs,Dv=8"),
    *("B=1,H=2,Sq=3,Sk=8,D=16,bias=hs,window=2:1", "B=1,H=4/1,Sq=2,Sk=7,D=24,Dv=16,shared_kv=1"),
    *("B=3,H=2,Sq=3,Sk=9,D=16,seqused=0:9", "B=2,H=2,Sq=3,Sk=9,D=16,seqused=1:9,page=2,mask=causal_lower_right"),
    *(
        "B=3,H=2,Sq=6,Sk=9,D=16,varlen=0:6/1:9,layout=bshd,lse=1",
        "B=2,H=2,Sq=4,Sk=8,D=16,varlen=1:4/1:8,page=2,layout=bshd",
    ),
    *("B=1,H=2,S=64,D=16,blocks=b:16x16:13+9", "B=1,H=2,Sq=5,Sk=7,D=16,score=s*2+t[h],tables=t:fp32:2"),
]
EIGHT_BITS = [
    *("B=2,H=4/2,Sq=3,Sk=7,D=16,kv=e4m3", "B=2,H=4/2,Sq=3,Sk=7,D=16,kv=int8,scales=head,mask=causal_lower_right"),
    *(
        "B=2,H=4/2,Sq=3,Sk=7,D=16,kv=e5m2,scales=token,layout=bshd",
        "B=2,H=4/2,Sq=3,Sk=9,D=16,kv=e4m3,scales=head,seqused=1:9,page=2",
    ),
    *(
        "B=2,H=4/2,Sq=4,Sk=8,D=16,kv=e4m3,scales=head,varlen=1:4/1:8,layout=bshd",
        "B=2,H=2,Sq=3,Sk=9,D=16,kv=e4m3,scales=token,seqused=1:9",
    ),
    *("B=1,H=4/2,S=160,D=16,dtype=e4m3,scales=block,lse=1", "B=1,H=2,S=40,D=16,dtype=e4m3,scales=head,turned=1"),
    "B=2,H=4/1,Sq=1,Sk=4,D=192,Dv=128,kv=e4m3,scales=columns,rotary_apart=1,seqused=1:4,page=2",
]
BACKWARD = [
    *("B=2,H=4/2,Sq=5,Sk=7,D=16,op=backward", "B=1,H=2,S=6,D=16,dtype=fp32,mask=causal,op=backward,lse=1,sink=1"),
    *(
        "B=1,H=2,Sq=5,Sk=8,D=16,Dv=8,bias=hs,grads=bias,op=backward",
        "B=1,H=2,Sq=5,Sk=9,D=16,window=2:0,alibi=1,op=backward",
    ),
    *("B=2,H=2,Sq=4,Sk=8,D=16,varlen=1:4/1:8,layout=bshd,op=backward", "B=1,H=2,Sq=5,Sk=7,D=16,softcap=3,op=backward"),
]
OTHERS = [
    *(
        "B=2,H=3,Sq=5,Sk=1,D=16,op=merge",
        "B=2,H=3,Sq=5,Sk=4,D=16,op=merge",
        "B=2,H=3,Sq=5,Sk=4,D=16,op=merge_narrow,layout=bshd",
    ),
    *(
        "B=2,H=2,S=40,D=16,op=quantize,kv=e4m3,scales=head",
        "B=2,H=4/2,S=40,D=16,op=quantize,kv=int8,scales=token,layout=bshd",
    ),
    *("B=1,H=2,S=140,D=16,op=quantize,kv=e4m3,scales=block", "B=2,H=2,S=9,D=16,op=quantize_smooth,kv=e5m2,scales=head"),
    *("B=2,H=2,S=40,D=16,dtype=e4m3,op=turn,turned=1", "B=2,H=4/2,Sq=3,Sk=9,D=16,op=append,seqused=0:8"),
    *(
        "B=2,H=4/2,Sq=3,Sk=9,D=16,op=append_halves,seqused=0:8,page=2",
        "B=2,H=4/2,Sq=3,Sk=9,D=16,op=append_pairs,seqused=0:8",
    ),
]
APPENDED = "B=3,H=4/2,Sq=3,Sk=70,D=16,dtype=bf16,mask=causal_lower_right,seqused=0:70,appended=1"

TILES = [
    *({"BLOCK_M": 16, "BLOCK_N": 16}, {"BLOCK_M": 64, "BLOCK_N": 32, "STAGES": 3, "RESCALE": "lazy_5"}),
    *({"BLOCK_M": 8, "BLOCK_N": 64, "SPLITS": 5, "STAGES": 2}, {"BLOCK_M": 128, "BLOCK_N": 40, "KEY_SPLIT": 2}),
    *({"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_ROWS": True, "TILE_ORDER": "heads_12"}, {"SPLITS": 33, "STAGES": 4}),
    *({"BLOCK_M": 16, "BLOCK_N": 128, "SPLITS": 16}, {"BLOCK_M": 64, "BLOCK_N": 128, "SPLITS": 8, "KEY_SPLIT": 2}),
    {"BLOCK_M": 32, "BLOCK_N": 64, "SCHEDULE": "balanced", "TILE_ORDER": "by_head", "BLOCKS_PER_SM": 2},
    {"BLOCK_M": 64, "BLOCK_N": 64, "S_TYPE": "fp16", "SOFTMAX": "rows", "KEPT_VECTORS": 2, "PV_BLOCK_M": 160},
    {"BLOCK_M": 32, "BLOCK_N": 16, "TILE_ORDER": "heads_4", "DIM_CHUNK": 32, "STAGES": 3, "RESCALE": "lazy_after"},
]
"""Genes of which the interpreter's cases depend."""


def _small_cases(problem: AttentionProblem, some: Iterable[dict[str, Any]]) -> Iterator[Any]:
    for family, params in itertools.product(("flash_mma", "split_kv"), some):
        config = KernelConfig(family, {"BLOCK_M": 1, "BLOCK_N": 8} | params)
        found = interpreter_cases(problem, config)
        yield [vars(case) | {"problem": case.problem.describe()} for case in found]


def _shown(tensor: torch.Tensor) -> Any:
    """What a tensor is, and two sums of its numbers, of which the first depends on their order."""
    numbers = tensor.double().nan_to_num(-7.0, 1e6, -1e6).clamp(-1e6, 1e6).flatten()
    numbers[numbers.abs() < 1e-12 + 1e-9 * max(numbers.abs().tolist(), default=0.0)] = 0.0  # what is left of a sum of 0
    weights = 1 + torch.arange(numbers.numel(), dtype=torch.float64, device=numbers.device) % 1009 / 1009
    sums = (f"{sum_.item():.3g}" for sum_ in (numbers.abs().mul(weights).sum(), numbers.abs().sum()))
    return [str(tensor.dtype), tuple(tensor.shape), tensor.stride(), *sums, int((numbers > 0).sum())]


def _of(text: str, kind: str) -> Any:
    problem = parse_shape(text)
    proof = proof_of(problem)
    with contextlib.ExitStack() as held:
        held.enter_context(torch.device("meta"))  # what is made on no device of its own has no numbers
        tensors = proof.make_inputs(problem, 3, "cpu", kind, 4)
        found = proof.make_answer(problem, tensors, kind, True)
        exact = {name: [*_shown(one.values), one.logarithms, one.partial, one.dims] for name, one in found.items()}
        if problem.op == "backward":  # as if products in 16 bits were exact
            of_torch = lambda *words, whole: exact_gradients(*words, torch.float64)
            held.enter_context(mock.patch.object(backward, "gradients_of_torch", of_torch))
            found = proof.make_answer(problem, tensors, kind, True)
    if problem.op == "backward" or (problem.dtype == "fp32" or problem.op != "forward"):
        exact["allowed"] = [f"{error:.2g}" for one in found.values() for error in (one.allowed_error, one.allowed_rms)]
    return [{name: _shown(tensor) for name, tensor in tensors.items()}, exact]


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for number, text in enumerate((*PLAIN, *EIGHT_BITS, *BACKWARD, *OTHERS)):
        kinds = getattr(proof_of(parse_shape(text)), "KINDS", inputs.KINDS)
        some = {kinds[0], *(kinds if text in (*EIGHT_BITS, *OTHERS) else kinds[number % 4 :: 4])}
        if text in BACKWARD:  # of these dQ is what roundings leave of a sum of 0
            some -= {*backward.CANCELLING}
        yield text, {kind: answer(_of, text, kind) for kind in (*sorted(some), "odd")}
        problem = parse_shape(text)
        found = proof_of(problem).device_cases(problem)
        yield f"cases of {text}", [[name, case.describe(), kind] for name, case, kind in found]
    for number, text in enumerate((*PLAIN, APPENDED)):
        yield f"the interpreter's cases of {text}", [*_small_cases(parse_shape(text), TILES[number % 2 :: 2])]
    for text in (APPENDED, f"{APPENDED},page=16"):
        case = cases.make_case("new keys", parse_shape(text), 3, "cpu")
        yield f"after {text}", {name: _shown(tensor) for name, tensor in case.changed().items()}
    plain, used = (parse_shape(text) for text in (PLAIN[0], PLAIN[8]))
    for rows, tile in itertools.product((1, 2, 3, 4, 5, 8, 9, 64), (16, 100)):
        found = [*cases.appended_cases(used, rows, tile), *cases.used_cases(used, tile)]
        yield f"cases of {rows} rows and {tile} keys", [[name, case.describe(), kind] for name, case, kind in found]
        masks = [plain.with_(mask=mask, window=window) for mask in MASKS for window in ("", "9:0")]
        some = [case for problem in masks for case in cases.beside_tiles(problem, rows, tile, 2)]
        some += [case for problem in masks for case in cases.begin_apart(problem, rows, tile, 1 + rows % 3)]
        yield f"edges of {rows} rows and {tile} keys", [case.describe() for case in some]
        splits = [cases.of_first_split(stages, 3, tile, rows) for stages in (1, 2, 5)]
        yield (
            f"heads and splits of {rows} rows and {tile} keys",
            [*(cases.by_heads(problem, rows).describe() for problem in (plain, *masks[1::2])), splits],
        )


def test_what_is_asked_and_answered_stays():
    assert not changed("answers")
