"""`evoattn.attention` beyond plain attention: torch's answer is the reference's, arguments that do not fit raise, and a
kernel gets the arguments that its launches say."""

import numpy as np
import pytest
import torch

import evoattn
from evoattn.correctness import reference
from evoattn.correctness.judge import judge
from evoattn.model.problem import AttentionProblem
from evoattn.ops.arguments import bias_reader
from evoattn.ops.call import Call, terms_of
from evoattn.ops.custom_op import operands, variant_lse_op, variant_op
from evoattn.ops.given import call_of
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel, by_formula
from tests.ops.fake_device import near, tensors
from tests.ops.fake_device import reference as fake_reference

PROBLEM = AttentionProblem(2, 4, 2, 37, 53, 16, "fp32")
CASES = [
    {"window": "9:0", "mask": "causal_upper_left"},
    {"window": "3:5", "scale": 0.4},
    {"window": "2:0", "mask": "causal_upper_left", "seqlen_q": 70},
    {"window": "2:0", "mask": "causal_lower_right", "seqlen_q": 70, "bias": "hs"},
    {"softcap": 2.0, "mask": "causal_lower_right"},
    {"sink": True, "lse": True},
    {"sink": True, "window": "9:0", "mask": "causal_upper_left", "lse": True},
    {"alibi": True, "lse": True},
    {"alibi": True, "mask": "causal_upper_left", "dtype": "bf16"},
    {"bias": "s"},
    {"bias": "bhs", "lse": True},
    {"bias": "bs", "mask": "causal_upper_left", "sink": True, "dtype": "fp16"},
    {"score": "s+table[h,k-q+20]*gate[h]", "tables": "table:fp32:4x41+gate:bf16:4"},
    {
        "score": "where(doc[b,k]==doc[b,q],s,-inf)",
        "tables": "doc:int32:2x60",
        "mask": "causal_lower_right",
        "lse": True,
    },
    {"score": "s*0.5-abs(q+d-k)//4", "softcap": 3.0, "bias": "hs", "sink": True, "scale": 0.3},
]


def arguments(problem: AttentionProblem, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """The call of `evoattn.attention` that asks for the problem."""
    words: dict[str, object] = {"scale": problem.scale, "enable_gqa": problem.group_size > 1, "return_lse": problem.lse}
    if problem.mask != "full":
        words["causal"] = problem.mask.removeprefix("causal_")
    if problem.window:
        words["window"] = tuple(map(int, problem.window.split(":")))
    if problem.softcap:
        words["softcap"] = problem.softcap
    names = {"sinks": "sinks", "slopes": "alibi_slopes", "bias": "bias"}
    words |= {names[name]: tensors[name] for name in problem.term_shapes if name in names}
    if own := problem.own_score:
        words["score"] = evoattn.Score(own.text, **{table.name: tensors[table.buffer] for table in own.tables})
    if problem.bias:
        words["bias"] = tensors["bias"][..., : problem.seqlen_k]
    return words


def answered(problem: AttentionProblem, kind: str = "plain") -> str:
    """What is wrong with the op's answer to random inputs; empty if nothing."""
    tensors = reference.make_inputs(problem, 5, "cpu", kind)
    answer = evoattn.attention(*(tensors[t] for t in "qkv"), **arguments(problem, tensors))
    outputs = {"o": answer[0], "lse": answer[1]} if problem.lse else {"o": answer}
    return judge(outputs, reference.make_answer(problem, tensors, double=True))[0]


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "extreme_terms"])
def test_torch_gives_the_reference_s_answer(fields, kind):
    assert answered(PROBLEM.with_(**fields), kind) == ""


def test_rows_in_chunks_give_the_same():
    problem = PROBLEM.with_(window="9:0", softcap=2.0, sink=True, bias="hs", lse=True)
    tensors = reference.make_inputs(problem, 5, "cpu")
    terms = terms_of(sinks=tensors["sinks"], bias=tensors["bias"][..., :53])
    call = Call(*(tensors[t] for t in "qkv"), enable_gqa=True, window=(9, 0), softcap=2.0, terms=terms, return_lse=True)
    whole, chunks = (by_formula(call, scores_at_once=count) for count in (1 << 26, 5 * 8 * 53))
    for one, other in zip(whole, chunks, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("seqlen_k", [53, 56])
def test_a_kernel_gets_the_right_arguments(device, fields, seqlen_k):
    """The fake device computes what the launch's arguments say."""
    problem = PROBLEM.with_(**{"dtype": "fp16", **fields, "seqlen_k": seqlen_k})
    tensors = reference.make_inputs(problem, 5, "cpu")
    answer = evoattn.attention(*(tensors[t] for t in "qkv"), **arguments(problem, tensors), strict=True)
    outputs = {"o": answer[0], "lse": answer[1]} if problem.lse else {"o": answer}
    assert judge(outputs, reference.make_answer(problem, tensors, double=True))[0] == ""
    launches = len(device.launches)
    evoattn.attention(*(tensors[t] for t in "qkv"), **arguments(problem, tensors), strict=True)
    assert len(device.launches) == launches + 1 and device.loads == 1


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.sampled(2)
def test_compiled_code_runs_a_kernel(device, fields):
    problem = PROBLEM.with_(**{"dtype": "fp16", **fields})
    tensors = reference.make_inputs(problem, 5, "cpu")
    evoattn.attention(*(tensors[t] for t in "qkv"), **arguments(problem, tensors), strict=True)  # loads and checks it
    launches = len(device.launches)

    words = arguments(problem, tensors)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(given, words):
        return evoattn.attention(*(given[t] * 1 for t in "qkv"), **words, strict=True)

    answer = compiled(tensors, words)
    outputs = {"o": answer[0], "lse": answer[1]} if problem.lse else {"o": answer}
    assert judge(outputs, reference.make_answer(problem, tensors, double=True))[0] == ""
    assert len(device.launches) == launches + 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.sampled(3)
def test_the_op_is_what_torch_expects_of_one(device, fields):
    problem = PROBLEM.with_(**{"dtype": "fp16", **fields})
    tensors = reference.make_inputs(problem, 5, "cpu")
    call = call_of(*(tensors[t] for t in "qkv"), arguments(problem, tensors))
    op = variant_lse_op if problem.lse else variant_op
    assert set(torch.library.opcheck(op, operands(call)).values()) == {"SUCCESS"}


def test_a_call_that_is_recorded_says_what_it_asks(device):
    tensors = reference.make_inputs(PROBLEM.with_(dtype="fp16"), 5, "cpu")
    with evoattn.capture() as shapes:
        evoattn.attention(*(tensors[t] for t in "qkv"), enable_gqa=True, window=(9, -1), softcap=5.0)
    assert [entry.problem.describe() for entry in shapes.entries] == [
        "B=2 H=4/2 Sq=37 Sk=53 D=16 fp16 full window=9:90 softcap=5"
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        ({"window": (1, 2, 3)}, "window must be"),
        ({"window": 5}, "window must be"),
        ({"window": (-2, 0)}, "window must be"),
        ({"softcap": -1.0}, "softcap must be positive"),
        ({"sinks": torch.zeros(3)}, "sinks must have one value for each of the 4 heads"),
        ({"alibi_slopes": torch.zeros(2, 4)}, "alibi_slopes must have one value"),
        ({"bias": torch.zeros(3, 1, 37, 53)}, "broadcastable"),
        ({"bias": torch.zeros(37, 53, dtype=torch.float16)}, "query's dtype"),
        ({"bias": torch.zeros(37, 53), "alibi_slopes": torch.zeros(4)}, "exclude each other"),
    ],
    ids=str,
)
def test_what_does_not_fit_raises(words, said):
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    with pytest.raises(ValueError, match=said):
        evoattn.attention(*(tensors[t] for t in "qkv"), enable_gqa=True, **words)


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("made", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "bias", "seqused_k"])
def test_what_is_not_a_tensor_is_named(name, made, gradients):
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    with torch.set_grad_enabled(gradients), pytest.raises(TypeError, match=f"{name} must be a tensor, not"):
        evoattn.attention(*(tensors[t] for t in "qkv"), enable_gqa=True, **{name: made([1, 2, 3, 4])})


def test_a_model_without_data_gets_shapes():
    """On the meta device, as models are built before their weights are loaded."""
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    q, k, v = (tensors[t].to("meta") for t in "qkv")
    with evoattn.capture() as shapes:
        assert evoattn.attention(q, k, v, enable_gqa=True).shape == q.shape
        assert evoattn.attention(q, k, v, enable_gqa=True, window=(3, 0), softcap=5.0).shape == q.shape
        packed, starts = torch.zeros(37, 4, 16, device="meta"), torch.zeros(2, dtype=torch.int32, device="meta")
        assert evoattn.attention_varlen(packed, packed, packed, starts, starts, 37, 37).is_meta
    assert len(shapes) == 3


def test_starts_that_are_a_list_are_named():
    q = torch.zeros(5, 2, 8)
    with pytest.raises(TypeError, match="cu_seqlens_q must be a tensor, not list"):
        evoattn.attention_varlen(q, q, q, [0, 2, 5], [0, 2, 5], 3, 3)


def test_gradients_flow_and_strict_refuses():
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    q, k, v = (tensors[t].clone().requires_grad_() for t in "qkv")
    sinks = torch.zeros(4, requires_grad=True)
    evoattn.attention(q, k, v, enable_gqa=True, sinks=sinks, window=(9, 9)).sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in (q, k, sinks))
    with pytest.raises(NoKernel):
        evoattn.attention(q, k, v, enable_gqa=True, sinks=sinks, strict=True)


def test_an_open_side_of_a_window():
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    q, k, v = (tensors[t] for t in "qkv")
    causal = evoattn.attention(q, k, v, causal=True, enable_gqa=True)
    torch.testing.assert_close(evoattn.attention(q, k, v, window=(-1, 0), enable_gqa=True), causal)


def test_out_takes_the_answer():
    tensors = reference.make_inputs(PROBLEM, 5, "cpu")
    q, k, v = (tensors[t] for t in "qkv")
    out = torch.empty_like(q)
    assert evoattn.attention(q, k, v, enable_gqa=True, softcap=3.0, out=out) is out
    torch.testing.assert_close(out, evoattn.attention(q, k, v, enable_gqa=True, softcap=3.0))


@pytest.mark.parametrize("order", [(0, 1, 0), (1, 0)])
def test_a_kernel_gets_a_bias_at_a_multiple_of_16_bytes(device, order):
    """A slice of a larger tensor may begin anywhere, and one plan serves all; what lies well already is not copied."""
    q, k, v = tensors(seqlen_q=3, seqlen_k=8)
    memory = torch.arange(25, dtype=torch.float16)
    for first in order:
        bias = memory[first : first + 24].view(3, 8)
        answer = evoattn.attention(q, k, v, enable_gqa=True, bias=bias, strict=True)
        assert near(answer, fake_reference(q, k, v, attn_mask=bias.double()))
        [plan] = current.runtime().plans.values()
        assert not any(at % 16 for at in plan._bound) and (bias.data_ptr() in plan._bound) == (first == 0)


def test_explain_says_why_torch_serves_a_call():
    """Whatever SDPA takes, and what a variant's own tensors forbid."""
    query, sinks = torch.zeros(1, 2, 3, 16), torch.zeros(2)
    assert evoattn.explain(*[torch.zeros(3, 16)] * 3).startswith("SDPA runs: ")
    assert "gradients" in evoattn.explain(query, query, query, sinks=sinks.clone().requires_grad_())
    assert "several devices" in evoattn.explain(query, query, query, sinks=sinks.to("meta"))


def test_a_bias_in_whole_rows_is_not_copied():
    wide = torch.zeros(3, 1, 2, 72, dtype=torch.float16)

    def copied(bias):
        given = bias_reader(bias, 2, 70)[0](bias)
        assert given.stride(2) == 72 and torch.equal(given[..., :70], bias.expand(-1, -1, 2, 70))
        return given.data_ptr() != bias.data_ptr()

    assert not copied(wide[..., :70])
    assert not copied(wide[:1, :, :, :70]), "of all batches"
    assert copied(torch.zeros(3, 1, 2, 70, dtype=torch.float16)), "rows of 70"
    assert copied(wide[:, :, :1, :70]), "one row for all queries"
    assert copied(torch.zeros(2 * 72 * 3 - 1, dtype=torch.float16).as_strided((3, 1, 2, 70), (144, 144, 72, 1)))
    assert copied(torch.zeros(2 * 72 * 3 + 1, dtype=torch.float16)[1:].view(3, 1, 2, 72)[..., :70]), "misaligned"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, said",
    [
        ({"sinks": torch.zeros(3).half()}, "sinks must have"),
        ({"bias": torch.zeros(37, 44).half()}, "broadcastable"),
        ({"bias": torch.zeros(37, 45).bfloat16()}, "query's dtype"),
        ({"window": [3]}, "window must be"),
        ({"window": 3}, "window must be"),
        ({"softcap": -1.0}, "softcap must be"),
    ],
    ids=str,
)
def test_what_does_not_fit_raises_after_a_call_that_did(device, words, said):
    """Which is kept, and not looked through again."""
    q, k, v = tensors()
    fitting = {"sinks": torch.zeros(4).half(), "bias": torch.zeros(37, 45).half(), "window": (3, 0), "softcap": 1.0}
    name = next(iter(words))
    for _ in range(2):
        evoattn.attention(q, k, v, enable_gqa=True, strict=True, **{name: fitting[name]})
    with pytest.raises((ValueError, TypeError), match=said):
        evoattn.attention(q, k, v, enable_gqa=True, **words)


@pytest.mark.slow
def test_forms_that_look_alike_are_told_apart(device):
    """By the kept call: a bias of one row and of all, a window and a wider one, as a list or a tuple."""
    q, k, v = tensors()
    calls = [{"bias": torch.randn(1, 45).half()}, {"bias": torch.randn(37, 45).half()}, {"bias": torch.randn(37, 45)}]
    calls += [{"window": (3, 0)}, {"window": [9, 1]}, {"window": (9, 1)}, {"softcap": 1.0}, {"softcap": 2.0}]
    for words in calls * 2:
        answer = evoattn.attention(q, k, v, enable_gqa=True, **words)
        double = {name: t.double() if name == "bias" else t for name, t in words.items()}
        expected = evoattn.attention(q.double(), k.double(), v.double(), enable_gqa=True, **double)
        assert (answer.double() - expected).abs().max() < 4e-3, words


GATED = evoattn.Score("s * gate[h]", gate=torch.tensor([0.5, 1.0, 2.0, 0.1]))


QUERY = torch.randn(1, 4, 8, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float16)
KEY, VALUE = torch.randn(2, 1, 4, 12, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float16)


def plain_call(**words):
    return evoattn.attention(QUERY, KEY, VALUE, **words)


def test_tables_are_read_at_each_call(device):
    """One `Score` serves many calls; another text, or tables under other names, is another kernel."""
    gate = torch.tensor([0.5, 1.0, 2.0, 0.1])
    score = evoattn.Score("s * gate[h]", gate=gate)
    first = plain_call(score=score, strict=True)
    assert torch.equal(plain_call(score=score, strict=True), first) and device.loads == 1
    gate.mul_(3)
    second = plain_call(score=score, strict=True)
    assert not torch.equal(second, first) and device.loads == 1
    assert torch.equal(plain_call(score=evoattn.Score("s * gate[h]", gate=gate.clone()), strict=True), second)
    assert not torch.equal(plain_call(score=evoattn.Score("s / gate[h]", gate=gate), strict=True), second)
    assert not torch.equal(plain_call(strict=True), second) and device.loads == 3


def test_a_table_that_changes_its_size_is_read_as_it_is_then(device):
    gate = torch.tensor([0.5, 1.0, 2.0, 0.1])
    score = evoattn.Score("s * gate[h]", gate=gate)
    plain_call(score=score, strict=True)
    gate.data = torch.tensor([0.5, 1.0])
    expected = plain_call(score=evoattn.Score("s * gate[h]", gate=torch.tensor([0.5, 1.0, 1.0, 1.0])), strict=True)
    assert torch.equal(plain_call(score=score, strict=True), expected)
    torch.testing.assert_close(by_torch(score), expected, atol=1e-3, rtol=1e-3)


def by_torch(score):
    """What no kernel computes."""
    return evoattn.attention(QUERY.clone().requires_grad_(), KEY, VALUE, score=score).detach()


def test_a_table_in_pieces_is_copied(device):
    gates = torch.tensor([[0.5, 1.0, 2.0, 0.1], [9.0, 9.0, 9.0, 9.0]]).t().contiguous()
    expected = plain_call(score=GATED, strict=True)
    assert torch.equal(plain_call(score=evoattn.Score("s*gate[h]", gate=gates[:, 0]), strict=True), expected)


def test_gradients_reach_tables():
    gate = torch.tensor([0.5, 1.0, 2.0, 0.1], requires_grad=True)
    plain_call(score=evoattn.Score("s * gate[h]", gate=gate)).float().square().sum().backward()
    assert gate.grad is not None and bool((gate.grad != 0).all())


@pytest.mark.parametrize(
    "make, error, why",
    [
        (lambda: evoattn.Score("s * gate[h]"), ValueError, "gate.* is nothing that a score can be made of"),
        (lambda: evoattn.Score("s + gate[h]", gate=[1.0]), TypeError, "table gate of a score must be a tensor of one"),
        (lambda: evoattn.Score("s + g[h]", g=torch.ones(4, dtype=torch.float64)), TypeError, "float16, bfloat16"),
        (lambda: evoattn.Score(3), TypeError, "must be a text, not int"),
        (lambda: plain_call(score="s * 2"), TypeError, "must be an evoattn.Score, not str"),
        (lambda: plain_call(score=lambda s, b, h, q, k: s), TypeError, "must be an evoattn.Score, not function"),
    ],
)
def test_what_is_no_score_raises_one_sentence(make, error, why):
    with pytest.raises(error, match=why) as raised:
        make()
    assert str(raised.value).count("\n") == 0


def test_explain_names_the_kernel(device):
    query = torch.randn(1, 4, 8, 16, dtype=torch.float16)
    assert "flash" in evoattn.explain(query, query, query, score=GATED)


@pytest.mark.slow
def test_compiled_code_without_a_device_computes_an_expression():
    compiled = torch.compile(lambda: plain_call(score=GATED), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), plain_call(score=GATED))
    torch._dynamo.reset()
