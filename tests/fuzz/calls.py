"""Calls of `evoattn.attention`, `attention_paged`, `attention_varlen` and `attention_mixed`, over all arguments."""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeVar

from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.workload import draw

One = TypeVar("One")

HEAD_DIMS = (8, 16, 20, 24, 32, 40, 48, 64, 64, 72, 80, 88, 96, 100, 112, 128, 128, 136, 160, 192, 200, 256, 320, 512)
LENGTHS = (1, 2, 3, 7, 16, 17, 31, 63, 64, 65, 113, 127, 128, 129, 203, 239, 256, 257, 511, 799, 1023, 1025, 2047, 4099)
GROUPS = (1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 16)
PLACES: tuple[str, ...] = (
    "bhsd",
    "bhsd",
    "bshd",
    "bshd",
    "sbhd",
    "fused",
    "wide",
    "every other",
    "late",
    "odd start",
    "expanded",
)
PLACES += ("expanded heads", "expanded rows", "expanded columns", "columns")
NUMBERS = ("normal", "normal", "normal", "large", "late key", "equal keys", "nan", "inf")
OUTS = ("", "", "", "given", "given", "other order", "every other column", "query")
TABLES = ("", "", "int64", "turned", "shared", "wild")
BIAS_PLACES = ("", "", "expanded", "turned", "odd start", "fewer dimensions")
PAGES = (16, 32, 64, 128, 256, 24, 1, 8)
VARIANTS = ("window", "softcap", "sink", "alibi", "bias", "mask", "seqused")
MOST_BATCH, MOST_BIASES = 70, 1 << 26
MOST_ELEMENTS = 1 << 28
"""Of query and key together: without keys a call has no operations, however many queries there are."""


@dataclass(frozen=True)
class Call:
    """What is called and with what; `made.Made` makes the tensors of it. Lengths of the batches, where they have their
    own, come from `seed`."""

    seed: int
    op: Literal["attention", "paged", "varlen", "mixed"] = "attention"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "fp16"
    places: str = "bhsd"
    """How the tensors lie in memory."""
    numbers: str = "normal"
    out: str = ""
    """Where the answer goes: empty for a new tensor."""
    is_causal: bool = False
    causal: str = "upper_left"
    scale: float | None = None
    lse: bool = False
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    sink: bool = False
    """Every third of them is -inf."""
    alibi: bool = False
    bias: str = ""
    """The dimensions over which it differs, of b, h, q and k."""
    mask: str = ""
    """`bool` or `float`: an `attn_mask` with the dimensions of `bias`."""
    bias_places: str = ""
    """How a bias or mask lies in memory."""
    seqused: bool = False
    page: int = 0
    table: str = ""
    """What is unusual in the table of pages: `shared` ones are in several sequences, `wild` entries, behind the last
    key, name no page."""

    @property
    def flops(self) -> float:
        """Of the two products, as if nothing were hidden."""
        pairs = self.batch * self.heads * self.seqlen_q * self.seqlen_k
        return 2.0 * pairs * (self.head_dim + self.value_dim)

    @property
    def elements(self) -> int:
        """Of query and key."""
        return self.batch * self.head_dim * (self.heads * self.seqlen_q + self.kv_heads * self.seqlen_k)

    @property
    def biases(self) -> int:
        """Elements of the bias or mask, or of what it is expanded to."""
        sizes = {"b": self.batch, "h": self.heads, "q": self.seqlen_q, "k": self.seqlen_k}
        return math.prod(sizes[letter] for letter in ("bhqk" if self.bias_places == "expanded" else self.bias))

    @property
    def masked(self) -> bool:
        """Whether torch would take a mask tensor: a NaN of a key that it hides stays one there."""
        lower = self.is_causal and self.causal == "lower_right" and self.seqlen_q != self.seqlen_k
        return bool(self.window or self.bias or self.mask or self.alibi or self.seqused) or lower

    @property
    def plain(self) -> bool:
        """Whether it is of `attention` and of no variant."""
        variant = self.window or self.softcap or self.sink or self.alibi or self.bias or self.seqused
        return self.op == "attention" and not variant

    def describe(self) -> str:
        """What differs from the plainest call."""
        plain = Call(0)
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value != getattr(plain, name))


def drawn(seed: int, count: int, most_flops: float) -> list[Call]:
    """The first `count` calls of a seed, none of more than `most_flops`."""
    rng = random.Random(f"evoattn calls {seed}")
    problems = iter(draw(seed, 20 * count))
    found: list[Call] = []
    while len(found) < count:
        own = _shape(rng) if rng.random() < 0.5 else _of(next(problems))
        call = _with_arguments(rng, replace(own, seed=1000 * seed + len(found)))
        if call.flops <= most_flops and call.biases <= MOST_BIASES and call.elements <= MOST_ELEMENTS:
            found.append(call)
    return found


def _of(problem: AttentionProblem) -> Call:
    """A plain call of the problem."""
    names = "batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim", "dtype"
    call = Call(0, **{name: getattr(problem, name) for name in names}, value_dim=problem.head_dim)
    causal = "lower_right" if problem.mask == "causal_lower_right" else "upper_left"
    return replace(call, is_causal=problem.mask != "full", causal=causal, places=problem.layout)


def _log(rng: random.Random, most: int) -> int:
    return max(1, round(math.exp(rng.uniform(0, math.log(most)))))


def _shape(rng: random.Random) -> Call:
    """Lengths that fit no tile, few or many heads, any head_dim."""
    kv_heads, group = _log(rng, 16), rng.choice(GROUPS)
    queries, keys = (rng.choice(LENGTHS) if rng.random() < 0.7 else _log(rng, 4096) for _ in "qk")
    kind = rng.random()
    queries, keys = (keys, keys) if kind < 0.3 else (1, keys) if kind < 0.45 else (queries, keys)
    batch = _log(rng, MOST_BATCH)
    if kind > 0.97:  # an empty tensor
        batch, queries, keys = rng.choice(((0, queries, keys), (batch, 0, keys), (batch, queries, 0)))
    dim = rng.choice(HEAD_DIMS)
    return Call(
        0,
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seqlen_q=queries,
        seqlen_k=keys,
        head_dim=dim,
        value_dim=dim if rng.random() < 0.8 else rng.choice(HEAD_DIMS),
        dtype=rng.choice(("fp16", "fp16", "bf16", "bf16", "fp32")),
        places=rng.choice(PLACES),
        is_causal=rng.random() < 0.5,
        causal=rng.choice(("upper_left", "lower_right")),
    )


def _with_arguments(rng: random.Random, call: Call) -> Call:
    """The call with some of the arguments beyond shapes."""
    op: Literal["attention", "paged", "varlen", "mixed"]
    op = rng.choices(("attention", "paged", "varlen", "mixed"), (64, 12, 12, 12))[0]
    if not (call.batch and call.seqlen_q and call.seqlen_k):
        op = "attention"
    call = replace(call, op=op, numbers=rng.choice(NUMBERS), out=rng.choice(OUTS))
    if rng.random() < 0.3:
        call = replace(call, scale=rng.choice((0.05, 0.125, 0.3, 1.0)))
    if op in ("paged", "mixed"):
        page = rng.choice(PAGES)
        call = replace(call, page=page, places=rng.choice(("bhsd", "wide", "late")), causal="lower_right", seqused=True)
        call = replace(call, table=rng.choice(TABLES))
    elif op == "varlen":
        call = replace(call, places=rng.choice(("bshd", "fused", "wide", "late")), causal="lower_right")
    if call.out == "query" and (call.value_dim != call.head_dim or call.places.startswith("expanded")):
        call = replace(call, out="given")
    call = replace(call, lse=op != "paged" and rng.random() < 0.25)
    wanted = rng.sample(VARIANTS, rng.choice((0, 0, 1, 1, 2))) if rng.random() < 0.6 else []
    for name in wanted:
        call = _with_variant(rng, call, name)
    own = call.op == "attention" and not call.places.startswith("expanded")
    if (call.numbers in ("nan", "inf") and (call.masked or not own)) or not call.seqlen_k:
        call = replace(call, numbers="normal")
    return call


def _subset(rng: random.Random, letters: Sequence[str]) -> str:
    return "".join(letter for letter in letters if rng.random() < 0.6)


def _over(rng: random.Random, call: Call) -> str:
    """The dimensions of a bias; one of some is the same for all keys."""
    letters = _subset(rng, "bhq")
    return letters if letters and call.seed % 6 == 0 else letters + "k"


def _with_variant(rng: random.Random, call: Call, name: str) -> Call:
    plain = call.op == "attention"
    if name == "window":
        sides = -1, 0, 3, 17, 64, 127, 500
        return replace(call, window=(rng.choice(sides), rng.choice(sides)))
    if name == "softcap":
        return replace(call, softcap=rng.choice((2.0, 20.0, 50.0)))
    if name == "sink":
        return replace(call, sink=True)
    if name == "alibi" and not (call.bias or call.mask):
        return replace(call, alibi=True)
    if name == "bias" and plain and not (call.alibi or call.mask):
        return replace(call, bias=_over(rng, call), bias_places=rng.choice(BIAS_PLACES))
    if name == "mask" and plain and not (call.alibi or call.bias):
        call = replace(call, mask=rng.choice(("bool", "float")), bias=_over(rng, call), is_causal=False)
        return replace(call, bias_places=rng.choice(BIAS_PLACES))
    if name == "seqused" and plain:
        return replace(call, seqused=True)
    return call
