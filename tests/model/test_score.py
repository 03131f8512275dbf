"""Expressions of scores: what they mean in torch, their derivatives, and what is refused."""

import itertools
import math
import random

import pytest
import torch

from evoattn.correctness.judge import judge
from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.score import OPERATORS, SCORE, cost, derivative, evaluate, parse_predicate, parse_score, text_of
from evoattn.model.score_cuda import in_cuda
from evoattn.model.score_lines import is_finite
from evoattn.model.shape_text import parse_shape

TABLES = "table:fp32:4x9+gate:bf16:4+doc:int32:2x8"
BATCH, HEADS, ROWS, KEYS = 2, 4, 5, 8


def values(**tensors):
    generator = torch.Generator().manual_seed(3)
    made = {
        "own_table": torch.randn(4, 9, generator=generator),
        "own_gate": torch.randn(4, generator=generator).bfloat16(),
        "own_doc": torch.randint(3, (2, 8), generator=generator, dtype=torch.int32),
        SCORE: torch.randn(BATCH, HEADS, ROWS, KEYS, generator=generator, dtype=torch.float64),
        "b": torch.arange(BATCH).view(-1, 1, 1, 1),
        "h": torch.arange(HEADS).view(-1, 1, 1),
        "q": torch.arange(ROWS).view(-1, 1),
        "k": torch.arange(KEYS),
        "d": KEYS - ROWS,
    }
    return made | tensors


def by_hand(given, formula):
    """The formula of Python's own numbers, score by score."""
    expected = torch.empty_like(given[SCORE])
    for b in range(BATCH):
        for h in range(HEADS):
            for q in range(ROWS):
                for k in range(KEYS):
                    expected[b, h, q, k] = formula(given[SCORE][b, h, q, k].item(), b, h, q, k)
    return expected


def test_a_relative_bias_times_a_gate_by_head():
    given = values()
    table, gate = given["own_table"], given["own_gate"]
    tree = parse_score("s + table[h, k - q + 4] * gate[h]", "table:fp32:4x9+gate:bf16:4").tree
    expected = by_hand(
        given, lambda s, b, h, q, k: s + table[h, min(max(k - q + 4, 0), 8)].item() * gate[h].double().item()
    )
    torch.testing.assert_close(evaluate(tree, given, torch), expected)


def test_documents_and_a_diagonal():
    given = values()
    doc = given["own_doc"]
    tree = parse_score("where((k <= q + d) & ~(doc[b, q] != doc[b, k]), s, -inf)", "doc:int32:2x8").tree
    expected = by_hand(given, lambda s, b, h, q, k: s if k <= q + 3 and doc[b, q] == doc[b, k] else -math.inf)
    assert torch.equal(evaluate(tree, given, torch), expected)


def test_tables_of_long_numbers_and_flags_and_indices_that_count_from_the_end():
    tables = "long:int64:8+flag:bool:4x8+table:fp32:4x9"
    long, flag = torch.tensor([1 << 40, 2, -(1 << 40), 3, 3, 3, 3, 3]), torch.rand(4, 8) < 0.5
    given = values(own_long=long, own_flag=flag)
    table = given["own_table"]
    tree = parse_score("where(flag[h,k] & (long[k] < 3), s + table[h, wrap(k - q)], s)", tables).tree
    expected = by_hand(given, lambda s, b, h, q, k: s + table[h, k - q].item() if flag[h, k] and long[k] < 3 else s)
    torch.testing.assert_close(evaluate(tree, given, torch), expected)
    assert "t_flag[" in in_cuda(tree) and "to_int(t_long[" in in_cuda(tree) and "wrapped((k - q)" in in_cuda(tree)


@pytest.mark.parametrize("text", [
    "where((b == 0) & ~(h > 1), -s, -1.5) - -2", "s+t[h,wrap(k-q)]*1e-05", "max(s, -inf)",
    "where((k >> 1) % 2 == 0, s, -inf)",
])  # fmt: skip
def test_a_text_of_an_expression_gives_it_back(text):
    tree = parse_score(text, "t:fp32:2x9" if "t[" in text else "").tree
    assert parse_score(text_of(tree), "t:fp32:2x9" if "t[" in text else "").tree == tree


@pytest.mark.parametrize("text, why", [("q + k", "not true or false"), ("s < 3", "of the indices and tables alone")])
def test_what_is_no_predicate(text, why):
    with pytest.raises(ValueError, match=why):
        parse_predicate(text)


EXPRESSIONS = {
    "s - abs(q - k) // 3 + (q - 2 * k) % 3": lambda s, b, h, q, k: s - abs(q - k) // 3 + (q - 2 * k) % 3,
    "max(s, h / 4) - min(q, k) * 0.5": lambda s, b, h, q, k: max(s, h / 4) - min(q, k) * 0.5,
    "20 * tanh(s / 20) + exp(-abs(s)) - log(1 + s * s)": lambda s, b, h, q, k: (
        20 * math.tanh(s / 20) + math.exp(-abs(s)) - math.log(1 + s * s)
    ),
    "where(0 <= q - k < 3, sqrt(s * s), -s)": lambda s, b, h, q, k: abs(s) if 0 <= q - k < 3 else -s,
    "s * (b + exp(1)) - -2": lambda s, b, h, q, k: s * (b + math.e) + 2,
    "where((b == 0) | (h > 1), s, 1)": lambda s, b, h, q, k: s if b == 0 or h > 1 else 1,
    "erf(s) + sin(s) * cos(k) + pow(1 + abs(s), 1.5)": lambda s, b, h, q, k: (
        math.erf(s) + math.sin(s) * math.cos(k) + (1 + abs(s)) ** 1.5
    ),
    "s + floor(k / 3) + whole(q / -2) + (k >> 1) + (1 << q) + bitand(q, 3)": lambda s, b, h, q, k: (
        s + k // 3 + int(q / -2) + (k >> 1) + (1 << q) + (q & 3)
    ),
}


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_it_means_what_it_means_in_python(text):
    given = values()
    torch.testing.assert_close(evaluate(parse_score(text).tree, given, torch), by_hand(given, EXPRESSIONS[text]))


@pytest.mark.parametrize(
    "text",
    [*EXPRESSIONS, "s / (1 + s * s)", "1 / (2 + s)", "tanh(s) * tanh(2 * s)", "s", "max(s * s, min(s, 1)) - s / 3"],
)
def test_the_derivative_is_autograd_s(text):
    tree, given = parse_score(text).tree, values()
    given[SCORE].requires_grad_()
    evaluate(tree, given, torch).sum().backward()
    found = evaluate(derivative(tree), given, torch)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64).expand_as(given[SCORE]), given[SCORE].grad)


def test_every_operator_is_used_above():
    text = " ".join((*EXPRESSIONS, "~ != <= & -s == | > < >= q >= k"))
    assert [name for name in OPERATORS if name not in text and name != "minus"] == []


@pytest.mark.parametrize(
    "text, tables, why",
    [
        ("q", "", "has no s"),
        ("s +", "", "is no expression"),
        ("s + x", "", "x is unknown"),
        ("s < 3", "", "true or false, not a score"),
        ("s + table[h]", "table:fp32:4x9", "has 2 dimensions, and 1 indices"),
        ("s + gate[s]", "gate:fp32:4", "must be whole numbers"),
        ("s", "gate:fp32:4", "does not use the table gate"),
        ("s + gate[h]", "gate:fp64:4", "must be of fp16, bf16, fp32, int32, int64, bool"),
        ("s + gate[h]", "gate:fp32:4+gate:fp32:4", "that name is taken"),
        ("s + k[h]", "k:fp32:4", "cannot be called k"),
        ("s + gate[h]", "gate:fp32:0", "must have 1 to"),
        ("s + gate[h]", "gate", "is no table"),
        ("s % 2", "", "% takes int where float is given"),
        ("s + (q < k)", "", "takes float where bool is given"),
        ("where(s, s, s)", "", "where takes bool where float is given"),
        ("max(s)", "", "max takes 2 values, not 1"),
        ("s + 1e99", "", "larger than what kernels count with"),
        ("s + 3000000000", "", "larger than what kernels count with"),
        ("s if q else 0", "", "nothing that a score can be made of"),
        ("__import__('os') + s", "", "nothing that a score can be made of"),
        ("s.real", "", "nothing that a score can be made of"),
        ("s + True", "", "nothing that a score can be made of"),
        ("s" + "+s" * 2000, "", "4000 characters at most"),
        ("(" * 300 + "s" + ")" * 300, "", "is no expression"),
    ],
)
def test_what_is_refused(text, tables, why):
    with pytest.raises(ProblemError, match=why.replace("(", r"\(")):
        AttentionProblem(1, 2, 2, 8, 8, 16, score=text, tables=tables)


def test_tables_without_a_score_are_refused():
    with pytest.raises(ProblemError, match="no score that uses them"):
        AttentionProblem(1, 2, 2, 8, 8, 16, tables="gate:fp32:4")


def test_a_shape_s_text_is_read_back():
    written = "B=2 H=4 S=8 D=16 score=s+max(table[h, k-q], abs(s))*gate[h] tables=table:fp32:4x9+gate:fp16:4 sink"
    problem = parse_shape(written)
    assert problem.score == "s+max(table[h,k-q],abs(s))*gate[h]" and problem.sink
    assert parse_shape(problem.describe()) == problem == AttentionProblem(**problem.to_dict())
    spaced = problem.with_(score="s + max( table[h , k - q], abs(s) ) * gate[h]")
    assert spaced == problem and spaced.short_name() == problem.short_name()
    assert problem.short_name() != problem.with_(score="s*table[h,q]-gate[h]").short_name()
    assert "score" not in problem.with_(score="", tables="").to_dict()
    assert [(one.name, one.shape, one.dtype) for one in problem.inputs[4:]] == [
        ("own_table", (4, 9), "float32"),
        ("own_gate", (4,), "float16"),
    ]


def test_one_kernel_serves_tables_of_all_sizes():
    def compiled(tables):
        return AttentionProblem(1, 4, 4, 8, 8, 16, sink=True, score="s+t[h,k]", tables=tables).compiled_variants

    assert compiled("t:fp32:4x9") == compiled("t:fp32:3x99") == ("sink", "score=s+t[h,k] t:fp32:2")
    assert compiled("t:fp32:4x9") != compiled("t:bf16:4x9")


def test_variants_are_expressions_too():
    """The reference of a soft cap, of slopes and of a bias is that of the same written by hand."""
    plain = AttentionProblem(2, 4, 2, 7, 9, 16, "fp32", "causal_lower_right", lse=True)
    for named, score, tables in (
        ({"softcap": 3.0}, "3*tanh(s/3)", ""),
        ({"alibi": True}, "s-t[h]*abs(q+d-k)", "t:fp32:4"),
        ({"bias": "bhs"}, "s+t[b,h,q,k]", "t:fp32:2x4x7x16"),
    ):
        problem, own = plain.with_(**named), plain.with_(score=score, tables=tables)
        tensors = make_inputs(problem, 3, "cpu", "extreme_terms")
        theirs = {"own_t": next((tensors[name] for name in ("slopes", "bias") if name in tensors), None)}
        expected = make_answer(problem, tensors, double=True)
        found = make_answer(own, tensors | theirs, double=True)
        for name in ("o", "lse"):
            torch.testing.assert_close(found[name].values, expected[name].values)


@pytest.mark.parametrize("queries", [1, 5])
def test_a_bias_before_an_expression_leaves_every_row_an_answer(queries):
    """A bias that hides keys would be infinity after a factor below 0, and NaN after one of 0."""
    problem = AttentionProblem(2, 8, 2, queries, 24, 16, bias="bhs", score="s*t[h]", tables="t:fp32:8", lse=True)
    tensors = make_inputs(problem, 3, "cpu", "extreme_terms")
    assert (tensors["own_t"] < 0).any()
    answer = make_answer(problem, tensors, double=True)
    assert all(torch.isfinite(answer[name].values).all() for name in ("o", "lse"))


def test_the_judge_takes_it_like_another_variant():
    problem = parse_shape("B=1 H=2 S=20 D=16 fp32 score=s*t[h] tables=t:fp32:2")
    tensors = make_inputs(problem, 3, "cpu")
    answer = make_answer(problem, tensors, double=True)
    assert judge({"o": answer["o"].values.float()}, answer)[0] == ""
    assert judge({"o": answer["o"].values.float() * 1.5}, answer)[0]


def test_cost_counts_all_that_there_is():
    assert cost(parse_score("s").tree) == (0.0, 0.0, 0.0)
    one, two = (cost(parse_score(text, "t:fp32:4").tree) for text in ("s+t[h]", "s+t[h]+t[k]"))
    assert all(more > less for less, more in zip(one[1:], two[1:], strict=True))
    assert cost(parse_score("tanh(s)").tree)[0] > 0


def test_cuda_has_no_name_of_its_own_language():
    score = parse_score("s+float[h]*int[k]", "float:fp32:4+int:int32:4")
    assert in_cuda(score.tree) == "(s + (to_float(t_float[inside(h, n_float_0)]) * float(t_int[inside(k, n_int_0)])))"


def test_random_texts_raise_nothing_else():
    draw = random.Random(5)
    for _ in range(2000):
        text = "".join(
            draw.choice("sqkhbd()[]+-*/%<>=&|~,. 0123 t where max inf\n#'") for _ in range(draw.randint(1, 12))
        )
        try:
            parse_score(text, "t:fp32:4" if "t[" in text else "")
        except ValueError as error:
            assert str(error)


EXTREMES = {SCORE: (-1e20, 0.0, 1e20), "b": (0, 7), "h": (0, 127), "q": (0, (1 << 31) - 1), "k": (0, (1 << 31) - 1)}


@pytest.mark.parametrize(
    ("text", "finite"),
    [
        ("s+(k-q)*exp(-((h+1)*8.0/16)*0.6931471805599453)", True),
        ("s-abs(q-k)*0.25+max(h,doc[b,k])-where(q<k,1,0)", True),
        ("20.0*tanh(s/20.0)*(1+erf(s))-cos(s)*sin(k*0.1)", True),
        ("where(q<k,s,s*0.5)+floor(k/3)+q//7%3", True),
        ("exp(min(s,3.0))", True),
        ("s/(0.5+abs(s))", True),
        ("s*s", False),
        ("s/(k-5)", False),
        ("s/h", False),
        ("exp(s)", False),
        ("exp(max(s,3.0))", False),
        ("where(q<k,s,-inf)", False),
        ("s+gate[h]", False),
        ("s*tanh(gate[h])", False),
        ("s+log(k*1.0)", False),
        ("s-sqrt(s)", False),
        ("s*h*k", False),
        ("s*1e30/1e30", False),
        ("max(s*1e30,-3.0)", False),
        ("where(q<k,s,0*(s*1e30*1e30))", False),
    ],
)
def test_which_scores_stay_finite(text, finite):
    """At extremes of what they are of, those are that are said to be."""
    tree = parse_score(text, TABLES, True).tree
    assert is_finite(tree) == finite
    if finite:
        for at in itertools.product(*EXTREMES.values()):
            found = evaluate(tree, values(**dict(zip(EXTREMES, map(torch.tensor, at), strict=True))), torch)
            assert torch.as_tensor(found).isfinite().all()


def test_an_answer_is_made_of_what_a_problem_says_of_scores():
    problem = parse_shape("B=1 H=3 Sq=5 Sk=9 D=16 dtype=fp32 scale=0.3 softcap=4 alibi=1 sink=1 score=s+0.1*k")
    tensors = make_inputs(problem, 7, "cpu")
    q, k, v = (tensors[name].double() for name in "qkv")
    given = tensors | {
        "h": torch.arange(3).view(-1, 1, 1),
        "q": torch.arange(5).view(-1, 1),
        "k": torch.arange(9),
        "d": 4,
    }
    scaled = evaluate(problem.scoring.scaled, {SCORE: q @ k.mT}, torch)
    scores = evaluate(problem.scoring.whole, given | {SCORE: scaled}, torch)
    sums = [evaluate(one, given | {SCORE: scores}, torch).expand(1, 3, 5, 1) for one in problem.scoring.sums]
    found = torch.softmax(torch.cat((scores, *sums), -1), -1)[..., :9] @ v
    torch.testing.assert_close(found, make_answer(problem, tensors, double=True)["o"].values, rtol=1e-12, atol=1e-12)
    assert len(sums) == 1 and torch.equal(scaled, 0.3 * (q @ k.mT))
