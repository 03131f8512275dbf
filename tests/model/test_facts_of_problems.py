"""What a problem, its mask, its lengths and its block lists say of themselves stays, until a change wants it
otherwise; so do the sentences about what is no problem."""

from collections.abc import Iterator
from typing import Any

import pytest

from evoattn.model import block_list
from evoattn.model.mask import Band
from evoattn.model.problem import ProblemError
from evoattn.model.sequences import parse_lengths, parse_sequences, rounded_up, starts, with_room
from evoattn.model.shape_text import by_name_or_shape, named_shapes, parse_shape
from tests.support.facts import answer, changed, told

SHAPES = [
    "B=2,Hq=8,Hkv=2,Sq=100,Sk=333,D=64,dtype=fp16,mask=causal",
    "B=1,H=2,S=300,D=128,dtype=bf16,mask=full,layout=bshd,lse=1",
    "B=2,H=3,Sq=333,Sk=100,D=72,dtype=fp32,mask=causal_upper_left,scale=0.5",
    "B=2,H=4,S=256,D=64,window=100:0,mask=causal,softcap=20,sink=1",
    "B=1,H=4,Sq=64,Sk=256,D=64,window=16:33,alibi=1",
    "B=1,Hq=4,Hkv=1,Sq=17,Sk=203,D=96,Dv=128,bias=bhs",
    "B=1,H=4,Sq=17,Sk=203,D=96,bias=s,lse=1,sink=1",
    "B=1,Hq=16,Hkv=1,Sq=3,Sk=203,D=576,Dv=512,shared_kv=1,dtype=bf16,mask=causal",
    "B=3,H=2,Sq=1,Sk=512,D=64,seqused=1:512,mask=causal",
    "B=3,H=2,Sq=5,Sk=512,D=64,seqused=0:512,page=16,mask=causal",
    "B=4,Hq=4,Hkv=2,S=200,D=64,varlen=1:200/1:200,mask=causal,layout=bshd",
    "B=4,H=2,Sq=20,Sk=200,D=64,varlen=sum:40/log:10:200,mask=causal,page=64",
    "B=1,H=2,S=300,D=64,score=s*gate[h]-max(q+d-k,0)/64+slope[k-q+99],tables=gate:fp32:2+slope:bf16:200",
    "B=2,H=2,S=640,D=64,mask=causal,blocks=h:64x64:1/3/7,predicate=(t[b,q]!=t[b,k])|(q-k<99),tables=t:int32:2x640",
    "B=2,H=2,S=1000,D=64,blocks=128x64:300+700",
    "B=1,H=2,Sq=500,Sk=600,D=64,blocks=bh:128x128:70+200:mixed",
    "B=1,H=2,S=640,D=64,blocks=h:16x16:70+200:mixed",
    "B=2,H=2,Sq=8,Sk=300,D=128,kv=e4m3,mask=causal",
    "B=2,H=2,Sq=8,Sk=300,D=128,kv=int8,scales=head,mask=causal",
    "B=1,H=2,S=256,D=128,dtype=e4m3,scales=head,turned=1",
    "B=1,Hq=4,Hkv=2,S=256,D=64,op=backward,mask=causal,deterministic=1",
    "B=1,H=2,S=256,D=64,op=backward,bias=s,grads=bias,batch_invariant=1",
    "B=1,H=2,S=256,D=64,op=backward,sink=1,grads=sinks,layout=bshd",
    "B=2,H=4,Sq=1,Sk=512,D=64,op=append",
    "B=2,H=4,Sq=1,Sk=512,D=64,op=append_halves",
    "B=2,H=4,Sq=7,Sk=3,D=64,op=merge",
    "B=1,H=2,S=256,D=64,op=quantize,kv=e4m3,scales=head",
]
WRONG = [
    *("", "B=1", "B=1,H=2,S=3", "B=0,H=2,S=3,D=64", "B=1,H=3,Hkv=2,S=3,D=64", "B=1,H=2,S=3,D=63", "B=1,H=2,S=3,D=x"),
    *("B=1,H=2,S=3,D=64,foo=1", "B=1,H=2,S=3,D=64,dtype=fp17", "B=1,H=2,S=3,D=64,mask=cousal", "B=1,B=2,H=2,S=3,D=64"),
    *("B=1,H=2,S=3,D=64,window=3", "B=1,H=2,S=3,D=64,window=3:4,mask=causal", "B=1,H=2,S=3,D=64,softcap=-1"),
    *("B=1,H=2,S=3,D=64,lse=2", "B=1,H=2,S=3,D=64,bias=x", "B=1,H=2,S=3,D=64,seqused=4:3", "B=1,H=2,S=3,D=64,page=16"),
    *("B=2,H=2,S=3,D=64,varlen=3", "B=2,H=2,S=3,D=64,varlen=3+4/3+3", "B=2,H=2,S=3,D=64,varlen=1:3,seqused=1:3"),
    *("B=1,H=2,S=3,D=64,shared_kv=1", "B=1,H=2,S=3,D=64,shared_kv=1,Dv=128", "B=1,H=2,S=3,D=64,score=s*t[h]"),
    *("B=1,H=2,S=3,D=64,score=s+", "B=1,H=2,S=3,D=64,blocks=3x4:5", "B=1,H=2,S=300,D=64,blocks=128x128:300,window=3:0"),
    "B=1,H=2,S=128,D=64,op=quantize,kv=e4m3,scales=block,seqused=1:9,page=64",
    *("B=1,H=2,S=3,D=64,kv=fp8", "B=1,H=2,S=3,D=64,scales=head", "B=1,H=2,S=3,D=64,turned=1"),
    *("B=1,H=2,S=3,D=64,grads=bias", "B=1,H=2,S=3,D=64,op=backward,grads=bias", "B=1,H=2,S=3,D=64,scale=nan"),
    *("B=1234567890,H=2,S=3,D=64", "B=1,H=2,S=3,D=64,deterministic=1", "B=1 H=2 S=3 D=64", "x: B=1,H=2,S=3,D=64"),
    *(
        "B=1,H=2,S=3,D=64,sink=1,alibi=1,bias=s,score=s",
        "B=99999,H=99999,S=99999,D=64",
        "B=1,H=2,S=3,D=64,batch_invariant=3",
    ),
]
REFUSED = {
    "B=2,H=4,Hkv=2,Sq=37,Sk=53,D=24,": [
        "scale=0", "scale=-1", "scale=nan", "scale=big", "softcap=-3", "softcap=inf", "window=128", "window=-1:0",
        "mask=causal,window=8:8", "sink=2", "bias=b", "alibi=1,bias=s", "seqused=30", "seqused=30:20",
        "seqused=log:0:20", "seqused=0:20,page=48", "page=16", "Dv=12", "Dv=32,shared_kv=1", "rotary_apart=1",
    ],
    "B=3,H=4,Hkv=2,Sq=37,Sk=53,D=24,": [
        "varlen=1", "varlen=3+4", "varlen=3+4+38", "varlen=0+0+0", "varlen=3+4+5/0+0+0", "varlen=sum:112",
        "varlen=long", "varlen=3+4+5,bias=s",
    ],
    "B=2,H=4,Hkv=2,Sq=200,Sk=133,D=16,": [
        "predicate=q>=k", "blocks=64x64:1/2/3,predicate=q+k", "blocks=64x64:1/2/3,predicate=q>t[k]",
        "blocks=64x64:1/2/3,tables=t:fp32:3", "blocks=64x64:1/2/2",
    ],
    "B=2,H=4,Hkv=2,Sq=200,Sk=133,D=16,blocks=": [
        "128", "128x128", "0x128:5", "128x0:5", "128x128:0", "x:128x128:5", "128x128:5:other", "hb:1x1:1",
    ],
    "B=2,H=4,Hkv=2,Sq=200,Sk=133,D=16,blocks=128x128:300,": [
        "window=9:0", "seqused=0:50", "seqused=0:50,page=16", "varlen=1:50", "kv=e4m3",
    ],
    "B=1,H=4,S=64,D=64,": [
        "dtype=bf16,kv=fp16", "dtype=bf16,kv=e4m3,scales=row", "dtype=bf16,scales=head", "dtype=fp32,kv=int8",
        "dtype=bf16,kv=e4m3,op=backward", "dtype=bf16,kv=e4m3,turned=1", "dtype=e4m3,seqused=1:64,turned=1",
        "dtype=e4m3,seqused=1:64,scales=block", "dtype=bf16,kv=e4m3,scales=block", "dtype=bf16,op=merge,turned=1",
        "op=turn,dtype=e4m3", "op=turn,turned=1", "op=turn,dtype=e4m3,turned=1,scales=head",
        "op=turn,dtype=e4m3,turned=1,kv=int8", "op=turn,dtype=e4m3,turned=1,Dv=32", "op=quantize,Dv=32",
    ],
    "": [
        "", "B=1", "B=1,H=16,S=1024", "B=1,H=16,S=1024,D=63", "B=0,H=1,S=4,D=64", "B=1,H=1,S=-4,D=64",
        "B=1,H=1,S=1e3,D=64", "B=1,H=3,Hkv=2,S=4,D=64", "B=1,H=1,S=4,D=64,dtype=fp4", "B=1,H=1,S=4,D=64,mask=window",
        "B=1,H=1,S=4,S=5,D=64", "B=1,H=1,S=4,D=64,colour=red", "B=1,H=1,S=999999999,D=8192", "B=²,H=1,S=4,D=64",
        "B:1 H:1 S:4 D:64", "B=1 H=1 S=4 D=64 fp4", "B=1 H=4/2 Hkv=2 S=4 D=64", "B=1 H=4/2/1 S=4 D=64",
        "B=1 H=1 S=4/2 D=64", "B=1 H=1 S=4 D=64 full causal",
    ],
}  # fmt: skip
"""What is no problem, by what it begins with."""
ARGUMENTS = [(), ("q",), ("k",), ("v",), ("o",), ("dq",), (5,), (17, 203), (203, 17), (0, 9), (16, 3), (40, 41)]
LENGTHS = ["3:9", "log:1:512", "0:0", "9:3", "log:0:3", "x"]
SEQUENCES = [("1:9", 3), ("sum:10/3:7", 3), ("3+0+9", 3), ("3+0", 3), ("0+0+0", 3), ("99:99", 2), ("log:2:9/5", 2)]


def _blocks(problem: Any) -> dict[str, Any]:
    """What is said of a block list."""
    mask, batch, heads, band, diagonal = asked = problem.block_mask
    lists = block_list.draw(*asked)
    counted = {name: getattr(block_list, name)(*asked) for name in ("visible_pairs", "blocks_of_rows", "partial_share")}
    read = block_list.keys_read(mask, batch, heads, problem.kv_heads, band, diagonal)
    shapes = mask.shapes(batch, heads, band), mask.blocks(band), mask.document_shapes(batch, band)
    return counted | {"lists": lists, "read": read, "shapes": shapes, "starts": answer(mask.starts, 1, 600)}


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for text in SHAPES:
        problem = answer(parse_shape, text)
        if isinstance(problem, str):
            yield text, problem
            continue
        yield text, told(problem, *ARGUMENTS, without=("with_",))
        yield f"mask of {text}", [told(problem.masking, *ARGUMENTS), told(problem.band, *ARGUMENTS)]
        if problem.blocks:
            yield f"blocks of {text}", _blocks(problem)
    yield "what is none", [answer(parse_shape, text) for text in WRONG]
    yield "what is refused", [answer(parse_shape, base + text) for base, texts in REFUSED.items() for text in texts]
    texts = ("h:64x64:2/1/3", "h:64x64:2/2/3", "b:64x0:1/1/3", "64x64:1+0", "64x64:70+200:2/1/2", "64x64:70+200:2/2/2")
    yield "texts of blocks", [answer(block_list.parse_blocks, text) for text in texts]
    counted = [block_list.parse_blocks(f"{dims}64x64:2/1/3") for dims in ("", "b:", "h:", "bh:")]
    asked = [(batch, heads, kv_heads) for batch in (1, 3) for heads, kv_heads in ((4, 2), (4, 4), (2, 1))]
    bands = [Band(100, 5000, None, None), Band(500, 300, None, 0)]
    read = [block_list.keys_read(mask, *of, band, 0) for mask in counted for of in asked for band in bands]
    yield "keys that counted lists read", read
    yield "names", [[name, answer(by_name_or_shape, name)] for name in (*named_shapes(), "seed_h10", "nothing")]
    yield "lengths", [answer(lambda text: parse_lengths(text).draw(7), text) for text in LENGTHS]
    yield "sequences", [answer(parse_sequences, text, count, 9, 7) for text, count in SEQUENCES]
    rooms = [(count, longest, rows) for count in (1, 7, 33) for longest in (1, 90, 1000) for rows in (5, 700, 9999)]
    yield "room", [with_room(*room) for room in rooms] + [rounded_up(n, 16, 4) for n in range(1, 999, 37)]
    yield "starts", starts((3, 0, 5))


def test_what_is_said_of_problems_stays():
    assert not changed("problems")


@pytest.mark.parametrize("base", REFUSED)
def test_what_is_no_problem_is_refused_in_a_sentence(base):
    for text in REFUSED[base]:
        with pytest.raises(ProblemError) as error:
            parse_shape(base + text)
        assert "\n" not in str(error.value) and str(error.value).endswith("."), text
