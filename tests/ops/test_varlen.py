"""`evoattn.attention_varlen`: torch's answer is the reference's, a kernel gets what its launches say, nothing reads the
lengths, and arguments that do not fit raise."""

import numpy
import pytest
import torch

import evoattn
from evoattn.correctness import reference
from evoattn.correctness.cases import sequenced
from evoattn.correctness.judge import judge
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.ops.custom_op import operands, variant_op
from evoattn.ops.explain import RecordedKernel
from evoattn.ops.given import call_of
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.wins import Win
from evoattn.storage import Storage
from tests.ops.fake_device import WGMMA, FakeDevice, Pick, fake_runtime

PROBLEM = sequenced(AttentionProblem(1, 4, 2, 37, 53, 16, "fp32", layout="bshd"))
CASES = [
    {},
    {"mask": "causal_lower_right"},
    {"mask": "causal_lower_right", "lse": True},
    {"window": "9:3", "scale": 0.4},
    {"mask": "causal_lower_right", "window": "5:0", "sink": True, "lse": True},
    {"softcap": 2.0, "sink": True},
    {"alibi": True, "mask": "causal_lower_right", "dtype": "bf16"},
    {"layout": "bhsd", "dtype": "fp16", "value_dim": 24},
]


def call(problem: AttentionProblem, tensors: dict[str, torch.Tensor], **words: object) -> dict[str, torch.Tensor]:
    """The outputs of the op, in the reference's shapes."""
    if problem.window:
        words["window"] = tuple(map(int, problem.window.split(":")))
    names = {"sinks": "sinks", "slopes": "alibi_slopes"}
    words |= {names[name]: tensors[name] for name in problem.term_shapes if name in names}
    words |= {"scale": problem.scale, "causal": problem.mask != "full", "softcap": problem.softcap}
    answer = evoattn.attention_varlen(
        *(tensors[name][0].transpose(0, 1) for name in "qkv"),
        tensors["cu_seqlens_q"],
        tensors["cu_seqlens_k"],
        problem.seqlen_q,
        problem.seqlen_k,
        return_lse=problem.lse,
        **words,
    )
    out, lse = answer if problem.lse else (answer, None)
    return {"o": out.transpose(0, 1)[None]} | ({} if lse is None else {"lse": lse[None]})


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_torch_gives_the_reference_s_answer(fields):
    problem = PROBLEM.with_(**fields)
    tensors = reference.make_inputs(problem, 5, "cpu")
    right = reference.make_answer(problem, tensors, double=True)
    assert judge(call(problem, tensors), right)[0] == ""


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.sampled(3)
def test_compiled_code_runs_a_kernel(device, fields):
    problem = PROBLEM.with_(**{"dtype": "fp16", **fields})
    tensors = reference.make_inputs(problem, 5, "cpu")
    compiled = torch.compile(lambda given: call(problem, given, strict=True), backend="aot_eager", fullgraph=True)
    right = reference.make_answer(problem, tensors, double=True)
    assert judge(compiled(tensors), right)[0] == "" and device.launches
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_a_kernel_gets_the_right_arguments(device, fields):
    """The fake device computes what the launch's arguments say; other lengths of as many rows are no other call."""
    problem = PROBLEM.with_(**{"dtype": "fp16", **fields})
    for lengths in (problem.varlen, "20+20+9+18+3/30+5+10+53+18"):
        problem = problem.with_(varlen=lengths)
        tensors = reference.make_inputs(problem, 5, "cpu")
        right = reference.make_answer(problem, tensors, double=True)
        assert judge(call(problem, tensors, strict=True), right)[0] == ""
    assert device.loads == 1


def test_a_kernel_of_the_other_family(tmp_path):
    device = FakeDevice()
    space, gpu, family = load_space("flash_mma", GPUS["h100"]), GPUS["h100"], FAMILIES["flash_mma"]
    configs = [space.make_config(params) for params in space.starting]
    config = next(config for config in configs if not family.why_impossible(PROBLEM.with_(dtype="bf16"), config, gpu))
    with current.use(fake_runtime(device, tmp_path, lambda problem, gpu: Pick("flash_mma", config))):
        problem = PROBLEM.with_(mask="causal_lower_right", dtype="bf16", sink=True)
        tensors = reference.make_inputs(problem, 5, "cpu")
        assert judge(call(problem, tensors, strict=True), reference.make_answer(problem, tensors, double=True))[0] == ""
    assert len(device.launches) >= 1


@pytest.mark.parametrize("number", [numpy.int64, torch.tensor])
def test_numbers_of_other_kinds_are_lengths_too(device, number):
    tensors = {name: tensor.half() for name, tensor in plain().items() if name in ("query", "key", "value")}
    out = evoattn.attention_varlen(**plain(**tensors, max_seqlen_q=number(5), max_seqlen_k=number(8), strict=True))
    assert out.shape == (9, 4, 16) and device.launches


def test_explain_names_the_kernel(device):
    tensors = {name: tensor.half() for name, tensor in plain().items() if name in ("query", "key", "value")}
    words = plain(**tensors)
    assert "flash_wgmma" in evoattn.explain(**words, causal=True)
    with pytest.raises(ValueError, match="too short"):
        evoattn.explain(**{**words, "max_seqlen_q": 2})


def test_it_has_gradients():
    problem = PROBLEM.with_(mask="causal_lower_right")
    tensors = reference.make_inputs(problem, 5, "cpu")
    for name in "qkv":
        tensors[name] = tensors[name].nan_to_num().requires_grad_()
    call(problem, tensors)["o"].square().sum().backward()
    for name in "qkv":
        assert torch.isfinite(tensors[name].grad).all() and tensors[name].grad.any()


def plain(**changes):
    """Arguments of a call of two sequences."""
    words = dict(query=torch.zeros(9, 4, 16), key=torch.zeros(11, 2, 16), value=torch.zeros(11, 2, 16))
    words |= dict(cu_seqlens_q=torch.tensor([0, 4, 9]), cu_seqlens_k=torch.tensor([0, 8, 11]))
    return words | dict(max_seqlen_q=5, max_seqlen_k=8) | changes


def test_sequences_without_queries_or_keys_at_all():
    nothing = torch.zeros(0, 2, 16)
    none, two = torch.zeros(3, dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
    words = plain(key=nothing, value=nothing, cu_seqlens_k=none, return_lse=True, sinks=torch.tensor([1.0, -2, 0, 3]))
    out, lse = evoattn.attention_varlen(**words)
    assert out.shape == (9, 4, 16) and not out.any()
    assert torch.equal(lse, words["sinks"][:, None].expand(4, 9))
    assert evoattn.attention_varlen(**plain(query=torch.zeros(0, 4, 16), cu_seqlens_q=none)).shape == (0, 4, 16)
    assert torch.equal(evoattn.attention_varlen(**plain(cu_seqlens_q=two)), torch.zeros(9, 4, 16))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"query": torch.zeros(1, 9, 4, 16)}, "query must have three dimensions"),
        ({"value": torch.zeros(1, 11, 2, 16)}, "value must have three dimensions"),
        ({"key": [1.0]}, "key must be a tensor, not list"),
        ({"key": torch.zeros(11, 3, 16)}, "do not fit"),
        ({"key": torch.zeros(11, 0, 16), "value": torch.zeros(11, 0, 16)}, "do not fit"),
        ({"query": torch.zeros(9, 3, 16)}, "do not fit"),
        ({"cu_seqlens_q": torch.tensor([0.0, 4, 9])}, "cu_seqlens_q must be int32"),
        ({"cu_seqlens_k": torch.tensor([0, 11])}, "cu_seqlens_k must be int32"),
        ({"cu_seqlens_k": torch.tensor([[0, 8, 11]])}, "cu_seqlens_k must be int32"),
        ({"max_seqlen_q": 4}, "max_seqlen_q=4 is too short"),
        ({"max_seqlen_k": -1}, "max_seqlen_k=-1 is too short"),
        ({"window": (3, -2)}, "window must be"),
        ({"out": torch.zeros(1)}, r"out must be .* of shape \[9, 4, 16\]"),
        ({"causal": "upper_left"}, "is the lower right one"),
        ({"causal": 1}, "causal must be True, False"),
        ({"sinks": torch.zeros(3)}, "sinks must have one value"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_one_sentence(changes, words):
    with pytest.raises((ValueError, TypeError), match=words) as error:
        evoattn.attention_varlen(**plain(**changes))
    assert "\n" not in str(error.value)


def test_without_a_device_strict_says_why():
    with pytest.raises(NoKernel, match="CPU"):
        evoattn.attention_varlen(**plain(strict=True))


@pytest.mark.slow
def test_compiled_code_calls_the_op(device):
    problem = PROBLEM.with_(mask="causal_lower_right", window="9:0", sink=True, dtype="fp16")
    tensors = reference.make_inputs(problem, 5, "cpu")
    compiled = torch.compile(lambda given: call(problem, given, strict=True)["o"], backend="aot_eager", fullgraph=True)
    right = reference.make_answer(problem, tensors, double=True)
    assert judge({"o": compiled(tensors)}, right)[0] == "" and device.launches
    torch._dynamo.reset()


@pytest.mark.slow
def test_the_op_is_what_torch_expects_of_one():
    words = plain(causal=True, scale=0.5, window=(9, 0), sinks=torch.zeros(4))
    tensors = [words.pop(name) for name in ("query", "key", "value")]
    torch.library.opcheck(variant_op, operands(call_of(*tensors, words)))
    with pytest.raises(NoKernel):
        variant_op(*operands(call_of(*tensors, words | {"strict": True})))


def test_capture_writes_down_how_long_all_sequences_are(device):
    tensors = {name: tensor.half() for name, tensor in plain().items() if name in ("query", "key", "value")}
    with evoattn.capture() as shapes:
        evoattn.attention_varlen(**plain(**tensors), causal=True)
    assert [entry.problem.describe() for entry in shapes.entries] == [
        "B=2 H=4/2 Sq=5 Sk=8 D=16 fp16 causal_lower_right bshd varlen=sum:9/sum:11"
    ]


def test_a_find_serves_other_lengths_up_to_a_power_of_two(tmp_path):
    gpu = GPUS["h100"]
    problem = AttentionProblem(64, 4, 2, 4096, 4096, 64, "bf16", varlen="log:16:4096", layout="bshd")
    found = Win(gpu.name, gpu.sm_count, problem, "flash_wgmma", {}, 1.0, 2.0)

    def key(**changes):
        return Win(gpu.name, gpu.sm_count, problem.with_(**changes), "flash_wgmma", {}, 1.0, 2.0).key

    assert key(batch=3, varlen="sum:900") == key(varlen="sum:5000/sum:4096") == found.key
    assert found.key not in (key(varlen=""), key(seqlen_k=4000), key(seqlen_q=1, varlen="sum:9"))


def test_a_recorded_kernel_is_called_so_too(tmp_path):
    problem = PROBLEM.with_(mask="causal_lower_right", dtype="fp16", lse=True)
    storage = Storage.open(str(tmp_path / "db.sqlite"))
    study = storage.create_study("s", problem, GPUS["h100"], True, "random", 0, ("flash_wgmma",), {}, {})
    config = load_space("flash_wgmma", GPUS["h100"]).make_config(WGMMA)
    found = Evaluation(TrialState.ESTIMATED, "", CompileInfo(), relative_cost=1.0)
    trial = storage.record(study, config, None, found)
    storage.close()
    kernel = RecordedKernel(trial, study, lambda pick: fake_runtime(FakeDevice(), tmp_path, pick))
    tensors = reference.make_inputs(problem, 5, "cpu")
    q, k, v = (tensors[name][0].transpose(0, 1) for name in "qkv")
    starts = {name: tensors[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    lengths = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_k}
    out, lse = kernel(q, k, v, causal=True, return_lse=True, **starts, **lengths)
    outputs = {"o": out.transpose(0, 1)[None], "lse": lse[None]}
    assert judge(outputs, reference.make_answer(problem, tensors, double=True))[0] == ""


@pytest.mark.parametrize(
    "starts, longest, right",
    [([0, 4, 7, 7], 4, slice(0, 7)), ([0, 0, 0, 9], 3, slice(6, 9))],
    ids=["rows past the last sequence", "a sequence longer than max_seqlen_q"],
)
def test_torch_reads_no_row_out_of_range(starts, longest, right):
    """On a CUDA device an index out of range would end the process's use of it."""
    words = plain(value=torch.ones(11, 2, 16), max_seqlen_q=longest, cu_seqlens_q=torch.tensor(starts))
    out = evoattn.attention_varlen(**words | {"cu_seqlens_k": torch.tensor([0, 3, 8, 11])})
    assert out.shape == (9, 4, 16)
    torch.testing.assert_close(out[right], torch.ones_like(out[right]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_under_autocast_answers_as_other_code(device, backend):
    words = plain(query=torch.randn(9, 4, 16), key=torch.randn(11, 2, 16), value=torch.randn(11, 2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        right = evoattn.attention_varlen(**words)
        answer = torch.compile(evoattn.attention_varlen, backend=backend)(**words)
    torch._dynamo.reset()
    assert answer.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(answer, right)


def test_the_op_refuses_what_it_has_no_gradient_for():
    words = plain()
    words["query"].requires_grad_()
    with pytest.raises(RuntimeError, match="computes no gradients"):
        tensors = [words.pop(name) for name in ("query", "key", "value")]
        variant_op(*operands(call_of(*tensors, words)))


def test_longest_lengths_far_beyond_the_rows_cost_no_more():
    q, k = (torch.randn(16, 2, 64) for _ in "qk")
    starts = torch.tensor([0, 5, 16], dtype=torch.int32)
    expected = evoattn.attention_varlen(q, k, k, starts, starts, 11, 11, causal=True)
    answer = evoattn.attention_varlen(q, k, k, starts, starts, 2**31, 2**31, causal=True)
    assert torch.allclose(answer, expected, atol=1e-5)
    words = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4096, "max_seqlen_k": 16}
    assert call_of(q, k, k, words).longest == (16, 16)
