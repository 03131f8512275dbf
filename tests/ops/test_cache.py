"""Keys in use and pages by `evoattn.attention` and `evoattn.attention_paged`: torch's answer and a kernel's are the
reference's, whatever lies behind the last key; compiled code calls one op; what does not fit is one sentence."""

import pytest
import torch

import evoattn
from evoattn.correctness import reference
from evoattn.correctness.judge import judge
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.ops.custom_op import operands, variant_op
from evoattn.ops.explain import RecordedKernel
from evoattn.ops.given import call_of
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from evoattn.storage import Storage
from tests.ops.fake_device import CONFIG, CacheDevice, fake_runtime, split_kv_pick

USED = AttentionProblem(5, 4, 2, 3, 70, 64, "fp16", seqused="0:60", layout="bshd")
CASES = [
    {},
    {"mask": "causal_lower_right"},
    {"window": "9:4"},
    {"mask": "causal_lower_right", "window": "9:0", "sink": True, "scale": 0.2},
    {"alibi": True, "softcap": 3.0},
]


@pytest.fixture
def cache_device(tmp_path):
    fake = CacheDevice()
    with current.use(fake_runtime(fake, tmp_path, split_kv_pick)):
        yield fake


def words(problem: AttentionProblem, tensors: dict[str, torch.Tensor]) -> dict[str, object]:
    """What both functions are asked beside tensors and masks."""
    made: dict[str, object] = {"scale": problem.scale, "softcap": problem.softcap}
    if problem.window:
        made["window"] = tuple(map(int, problem.window.split(":")))
    if problem.bias:
        made["bias"] = tensors["bias"][..., : problem.seqlen_k]
    names = {"sinks": "sinks", "slopes": "alibi_slopes"}
    return made | {names[name]: tensors[name] for name in problem.term_shapes if name in names}


def asked(problem: AttentionProblem, tensors: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    """The op's answer, of the problem's logical shape."""
    q, k, v = (tensors[t] for t in "qkv")
    others = words(problem, tensors) | more
    causal = problem.mask != "full"
    if not problem.page:
        others |= {"seqused_k": tensors["seqused"], "enable_gqa": True}
        return evoattn.attention(q, k, v, causal=causal, **others)
    tensors_paged = (t.transpose(1, 2) for t in (q, k, v))
    return evoattn.attention_paged(
        *tensors_paged, tensors["table"], tensors["seqused"], causal=causal, **others
    ).transpose(1, 2)


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_torch_gives_the_reference_s_answer(fields, page):
    problem = USED.with_(**fields, page=page)
    tensors = reference.make_inputs(problem, 5, "cpu")
    assert judge({"o": asked(problem, tensors)}, reference.make_answer(problem, tensors, double=True))[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_kernel_gets_the_right_arguments(cache_device, fields, page):
    problem = USED.with_(**fields, page=page)
    tensors = reference.make_inputs(problem, 5, "cpu")
    answer = reference.make_answer(problem, tensors, double=True)
    for integers in (torch.int32, torch.int64):
        tensors |= {name: tensors[name].to(integers) for name in ("seqused", "table") if name in tensors}
        launched = len(cache_device.launches)
        assert judge({"o": asked(problem, tensors, strict=True)}, answer)[0] == ""
        assert len(cache_device.launches) > launched


def test_other_lengths_and_pages_take_the_same_plan(cache_device):
    problem = USED.with_(page=16)
    tensors = reference.make_inputs(problem, 5, "cpu")
    asked(problem, tensors, strict=True)
    launched, loads = len(cache_device.launches), cache_device.loads
    other = problem.with_(seqused="3:70")
    tensors = reference.make_inputs(other, 6, "cpu")
    answer = reference.make_answer(other, tensors, double=True)
    assert judge({"o": asked(other, tensors, strict=True)}, answer)[0] == ""
    assert (len(cache_device.launches), cache_device.loads) == (launched + 1, loads)


def test_the_answer_has_the_queries_layout(cache_device):
    problem = USED.with_(page=16)
    tensors = reference.make_inputs(problem, 5, "cpu")
    q, k, v = (tensors[t].transpose(1, 2) for t in "qkv")
    arguments = (q, k, v, tensors["table"], tensors["seqused"])
    answer, out = evoattn.attention_paged(*arguments), torch.empty_like(q)
    assert answer.shape == q.shape == (5, 3, 4, 64) and answer.is_contiguous()
    assert evoattn.attention_paged(*arguments, out=out) is out and torch.equal(out, answer)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "bias"), [(0, ""), (16, ""), (0, "bs")])
def test_compiled_code_calls_the_op(cache_device, page, bias):
    problem = USED.with_(mask="causal_lower_right", window="9:0", sink=True, page=page, bias=bias)
    tensors = reference.make_inputs(problem, 5, "cpu")
    compiled = torch.compile(lambda given: asked(problem, given, strict=True), backend="aot_eager", fullgraph=True)
    answer = reference.make_answer(problem, tensors, double=True)
    launched = len(cache_device.launches)
    assert judge({"o": compiled(tensors)}, answer)[0] == ""
    assert len(cache_device.launches) > launched
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("page", [0, 16])
def test_the_op_is_what_torch_expects_of_one(page):
    problem = USED.with_(page=page)
    tensors = reference.make_inputs(problem, 5, "cpu")
    q, k, v = (tensors[t] for t in "qkv")
    words = {"seqused_k": tensors["seqused"], "block_table": tensors.get("table"), "causal": True, "scale": 0.5}
    if page:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    words |= {"window": (9, 0), "enable_gqa": True}
    torch.library.opcheck(variant_op, operands(call_of(q, k, v, words)))
    with pytest.raises(NoKernel):
        variant_op(*operands(call_of(q, k, v, words | {"strict": True})))


def test_explain_and_capture_say_what_is_asked(cache_device):
    problem = USED.with_(page=16)
    tensors = reference.make_inputs(problem, 5, "cpu")
    q, k, v = (tensors[t].transpose(1, 2) for t in "qkv")
    said = evoattn.explain(q, k, v, block_table=tensors["table"], seqused_k=tensors["seqused"])
    assert said.startswith("split_kv") and not cache_device.loads
    odd = torch.zeros(4, 24, 2, 64, dtype=torch.float16)
    assert "page must be one of" in evoattn.explain(
        q, odd, odd, block_table=tensors["table"], seqused_k=tensors["seqused"]
    )
    with evoattn.capture() as shapes:
        asked(problem, tensors)
    assert [entry.problem.describe() for entry in shapes.entries] == [
        "B=5 H=4/2 Sq=3 Sk=80 D=64 fp16 full bshd seqused=0:80 page=16"
    ]


def test_pages_of_any_size_are_answered_by_torch(cache_device):
    problem = USED.with_(page=16, seqused="60:60")
    tensors = reference.make_inputs(problem, 5, "cpu")
    whole = {name: tensors[name][tensors["table"].clamp(0, 24).long()].transpose(2, 3).flatten(1, 2) for name in "kv"}
    caches = (whole[name].unflatten(1, (2, 40)).flatten(0, 1) for name in "kv")
    table = torch.arange(10, dtype=torch.int32).view(5, 2)
    odd = evoattn.attention_paged(tensors["q"].transpose(1, 2), *caches, table, tensors["seqused"])
    torch.testing.assert_close(odd.transpose(1, 2), asked(problem, tensors), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"seqused_k": torch.zeros(4, dtype=torch.int32)}, r"seqused_k must be int32 \[5\], not int32 \[4\]"),
        ({"seqused_k": torch.zeros(5)}, r"seqused_k must be int32 \[5\], not float32"),
        ({"block_table": torch.zeros(5, dtype=torch.int32)}, r"block_table must be int32 \[5, pages\]"),
        ({"block_table": torch.zeros(4, 5, dtype=torch.int32)}, "block_table must be int32"),
        ({"k_cache": torch.zeros(25, 2, 16, dtype=torch.float16)}, "k_cache must have four dimensions"),
        ({"v_cache": torch.zeros(24, 16, 2, 64, dtype=torch.float16)}, "the same pages and heads"),
        ({n: torch.zeros(0, 16, 2, 64, dtype=torch.float16) for n in ("k_cache", "v_cache")}, "must not be empty"),
        ({"seqused_k": None}, "block_table needs seqused_k"),
        ({"query": torch.zeros(5, 3, 4, 32, dtype=torch.float16)}, "do not fit: the last dimension is one head_dim"),
        ({"query": torch.zeros(5, 3, 3, 64, dtype=torch.float16)}, "do not fit"),
        ({"out": torch.zeros(1)}, r"out must be a torch.float16 tensor of shape \[5, 3, 4, 64\]"),
        ({"causal": "lower"}, "causal must be True, False, 'upper_left' or 'lower_right', not 'lower'"),
        ({"causal": "upper_left"}, "the causal mask of packed sequences and of pages is the lower right one"),
        ({"block_table": None}, "block_table must be a tensor, not NoneType"),
        ({"v_cache": "cache"}, "v_cache must be a tensor, not str"),
    ],
    ids=str,
)
def test_what_does_not_fit_raises_a_sentence(change, said):
    tensors = reference.make_inputs(USED.with_(page=16), 5, "cpu")
    q, k, v = (tensors[t].transpose(1, 2) for t in "qkv")
    given = dict(query=q, k_cache=k, v_cache=v, block_table=tensors["table"], seqused_k=tensors["seqused"]) | change
    with pytest.raises((ValueError, TypeError), match=said) as error:
        evoattn.attention_paged(**given)
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_gradients_flow():
    tensors = reference.make_inputs(USED.with_(dtype="fp32"), 5, "cpu")
    q, k, v = (tensors[t].clone().requires_grad_() for t in "qkv")
    evoattn.attention(q, k, v, enable_gqa=True, seqused_k=tensors["seqused"]).sum().backward()
    assert q.grad.abs().sum() > 0 and not v.grad[1, :, USED.key_lengths[1] :].any()


@pytest.mark.parametrize("page", [0, 16])
def test_a_recorded_kernel_is_called_so_too(tmp_path, page):
    problem = USED.with_(mask="causal_lower_right", window="9:0", page=page)
    storage = Storage.open(str(tmp_path / "db.sqlite"))
    study = storage.create_study("s", problem, GPUS["h100"], True, "random", 0, ("split_kv",), {}, {})
    config = load_space("split_kv", GPUS["h100"]).make_config(CONFIG)
    found = Evaluation(TrialState.ESTIMATED, "", CompileInfo(), relative_cost=1.0)
    trial = storage.record(study, config, None, found)
    storage.close()
    kernel = RecordedKernel(trial, study, lambda pick: fake_runtime(CacheDevice(), tmp_path, pick))
    tensors = reference.make_inputs(problem, 5, "cpu")
    given = {"causal": True, "window": (9, 0), "seqused_k": tensors["seqused"]}
    q, k, v = (tensors[t] for t in "qkv")
    if page:
        paged = (t.transpose(1, 2) for t in (q, k, v))
        answer = kernel(*paged, **given, block_table=tensors["table"]).transpose(1, 2)
    else:
        answer = kernel(q, k, v, **given, enable_gqa=True)
    assert judge({"o": answer}, reference.make_answer(problem, tensors, double=True))[0] == ""
    with pytest.raises(NoKernel):
        kernel(q, q, q, is_causal=True)


def test_the_op_refuses_what_it_has_no_gradient_for():
    query, cache = torch.zeros(1, 4, 1, 16, requires_grad=True), torch.zeros(1, 2, 8, 16)
    with pytest.raises(RuntimeError, match="computes no gradients"):
        used = {"seqused_k": torch.tensor([5]), "enable_gqa": True}
        variant_op(*operands(call_of(query, cache, cache, used)))
