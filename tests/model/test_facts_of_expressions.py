"""What is made of an expression of scores stays, until a change wants it otherwise: its tree, its derivatives, its
CUDA, the lines that it is, the blocks of keys that its predicate shows, and what it comes to."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from benchmarks.flex.mods import MODS, Shape, Written
from evoattn.families import mask_blocks
from evoattn.families.mask_blocks import MaskShape
from evoattn.model import score, score_cuda, score_lines
from evoattn.ops import flex, mods
from evoattn.ops.arguments import Score
from tests.model.test_score import TABLES, values
from tests.ops.test_flex_mods import OPERATIONS
from tests.support.facts import answer, changed

SCORES = [
    *("s", "s + table[h, k - q + 4] * gate[h]", "s*gate[h]-max(q+d-k,0)/64", "20*tanh(s/20)", "s-abs(q+d-k)*gate[h]"),
    *("where(doc[b,k]==doc[b,q%8],s,-inf)", "where((q-k<3)&(k-q<=2),s,-inf)", "s+min(k,q)*0.5", "exp(s)-exp2(s/2)"),
    *(
        "s*s-sqrt(abs(s))",
        "log(abs(s)+1)",
        "sin(s)*cos(s)",
        "where(s>0,s,s*0.1)",
        "-s",
        "s/(1+abs(s))",
        "s**2",
        "foo(s)",
    ),
    *("s+", "s+table[h]", "s+gate[k,q]", "s+missing[h]", "s if q else k", "(q//3+k%5)*s", "s+gate[h]*(k-q-d)"),
    *("s+max(min(q-k,7),-7)*0.01", "s*2**-1", "where(k<=q+d,s,-inf)", "relu(s)", "sigmoid(s)", "s-1e9*(k>q)"),
    *("where(q<k,-inf,s)", "s+where(k<=q,0,-inf)", "where(k<=q,where(q-k<4,s*2,-inf),-inf)", "where(k<=q,2,-inf)+s"),
    *("s*(k-q)", "where((k/3.5<q)&(gate[h]*k<q),s,s/(k+1.5))", "-0.5*tanh(s/-0.5)", "0.5*tanh(s/0.5)"),
    *("s-t[h]*abs(q-k)", "s-(d-(k-q))*t[h]", "s+t[k]", "2.0*(s*t[h])+min(k-q,9)*0.5", "where(q>=k,-s,-inf)", "s/t[h]"),
    *("s/(1+abs(q//2-k))", "tanh(s/4)*t[q]", "s+where(k<q,t[k],2)", "s+whole(k/3.0)", "where(k<0,s,-t[q])"),
    *("s+t[k-q]", "s+t[q]*k", "s+t[q*k]", "tanh(s*t[min(q,k)])"),
    *(f"s+t[where(k{sign}q+1,3,k-q)]" for sign in ("<", "<=", ">", ">=", "==", "!=")),
]
PREDICATES = [
    *("k<=q", "k<=q+d", "(q-k<99)&(k<=q)", "abs(q-k)<=5", "abs(k-q-d)<5", "doc[b,k]==doc[b,q]", "q+d>=k", "q-k<3"),
    *("(k<=q)|(k<4)", "((k//3+q//5)%7<3)|((q+h)%2==b)", "not_there", "k", "(k<=q)&(doc[b,k]==doc[b,q])", "k-q<=-2"),
    *(
        "(q-7<k)&(k<q+9)",
        "2*k<=q",
        "q<5",
        "k!=q",
        "~(k>q)",
        "(doc[b,q]!=doc[b,k])|(q-k<99)",
        "k<q+3&k>q-3",
        "(q==k)&(k==q)&(q<9)",
        "-(k-q+3)<=5",
        "(n[q]==n[k])&(n[q]>=0)",
        "(q==k)&(k<9)&(k!=3)",
        "(n[q]<n[k])&(n[q]>=0)",
        "(q==k)|(k<9)",
        "(n[wrap(q-k)]*2+(q//8)%7!=-abs(k-3))|~f[h,min(q,k)]",
        "where(f[h,q],max(k>>2,1),bitand(k,7))<=whole(b)",
        "((q>=k)&(q>3))&(whole(q/2.0)<k)&(w[k]>0.5)",
        "(q==k)&(q<1)&(q<2)&(q<3)&(q<4)&(q<5)",
        "(q>=k)&(q-k<n[h])",
        "(n[q]==n[k])|(q>=k)",
        "(k<9)&(n[q*k]>0)",
        "(k/2<q)&(n[k]<q)",
        *("abs(k-q+2)<4", "(q>=k)&(q-k<9)", "(k<=q+1)&(k<q+5)&(q-k<=3)&(q-k<7)", "(q-k<=3)&(k<=q+1)", "k-q>2", "q-k>2"),
        *("q+1>k", "abs(2*q-k)<3", "abs(q-1)<2", "abs(q+k)<5", "(q>=k)|(k<3)", "k+k<=q", "(q>=k)&(k<3)"),
        "(whole(q+1)<k)&(n[whole(q//2)]>0)",
    ),
]
OF_TREE = {
    score: ("text_of", "cost", "loads_pairs"),
    score_cuda: ("in_cuda", "changed_in_cuda", "is_natural"),
    score_lines: ("is_shift", "loads_apart", "linear", "softcap_of", "added_of", "band_of", "hiding_of", "lines_of"),
}
EVERY = f"{TABLES}+t:fp32:64+n:int32:64+f:bool:4x64+w:fp32:9"
OTHERS = {
    "own_t": torch.arange(64.0) % 7 - 2,
    "own_n": (torch.arange(64, dtype=torch.int32) * 5) % 7 - 2,
    "own_f": torch.arange(256).view(4, 64) % 3 > 0,
    "own_w": torch.linspace(0, 1, 9),
}
MASKS = ((1, 1, 77, 301, 128, 128), (2, 3, 4096, 5000, 64, 32))
NAMES = ("s", "b", "h", "q", "k", "d")


def _of(tree: Any) -> dict[str, Any]:
    found = {name: answer(getattr(home, name), tree) for home, names in OF_TREE.items() for name in names}
    found["steps"] = answer(score_cuda.in_cuda, tree, True, True)
    found["depends"] = [score.depends_on(tree, name) for name in NAMES]
    found["derivative"] = answer(lambda: score.text_of(score.derivative(tree)))
    for buffer in ("own_table", "own_gate", "own_doc"):
        loads = score.elements(tree, buffer)
        found[buffer] = [[load, answer(lambda at: score.text_of(score.derivative(tree, at)), load)] for load in loads]
        found[f"{buffer} in CUDA"] = [answer(score_cuda.place_in_cuda, load) for load in loads]
    number = answer(score.evaluate, tree, values(**OTHERS), torch)
    if isinstance(number, torch.Tensor):
        number = number.double().broadcast_to(2, 4, 5, 8)
        number = number.clamp(-1e4, 1e4).sum((2, 3)).round(decimals=4).tolist()
    return found | {"number": number}


SIGNS = (*"+-*/", "minus", "abs", "max", "min", "where", "exp", "tanh", "erf", "sin", "cos", "floor", "log")


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for parse, texts in ((score.parse_score, SCORES), (score.parse_predicate, PREDICATES)):
        for text in texts:
            used = "+".join(table for table in EVERY.split("+") if f"{table.partition(':')[0]}[" in text)
            parsed = answer(parse, text, used)
            yield text, parsed if isinstance(parsed, str) else [parsed, _of(parsed.tree)]
    shape = Shape(2, 4, 77, 301)
    written = {name: make(shape) for name, make in MODS.items()}
    written |= {name: Written(lambda s, b, h, q, k, own=own: own(s, q, k)) for name, own in OPERATIONS.items()}
    for name, one in written.items():
        captured = list[torch.Tensor]()
        traced = mods.trace(one.score_mod, one.mask_mod, captured)
        tables = Score.of_texts("", "", traced.tables(captured)).tables
        parsed = (score.parse_score, traced.score), (score.parse_predicate, traced.predicate)
        trees = [_of(parse(text, tables, True).tree) for parse, text in parsed if text]
        yield f"said by {name}", [flex._said_of(traced, tables), tables, *trees]
    places = product((None, -3, -1, 0, 1, 4), (None, -1, 0, 1, 4, 9), (5, 8, 9), (8, 9, 13))
    yield "masks", [answer(score_lines.masking_of, (low, high), q, k) for low, high, q, k in places]
    tables = TABLES, "t:fp32", "t:fp99:3", "t:fp32:0", "t:fp32:3+t:fp32:4", "s:fp32:3"
    yield "tables", [answer(score.parse_tables, text) for text in tables]
    ends = (
        ((-2.0, 3.0), (0.5, 4.0)),
        ((-5.0, -1.0), (-2.0, 1.0), (2.0, 7.0)),
        ((1.0, 2.0),),
        ((3.0, 30.0), (-4.0, -3.0)),
    )
    yield "ranges", [[sign, [answer(score_lines._of_ranges, sign, [*one]) for one in ends]] for sign in SIGNS]
    yield "launches", [mask_blocks.launches(MaskShape(*sizes), score.parse_tables(TABLES)) for sizes in MASKS]


def test_what_is_made_of_expressions_stays():
    assert not changed("expressions")
