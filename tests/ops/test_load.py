"""`evoattn.load`: a recorded kernel is called as `evoattn.attention` is, and serves the problems it was found for.
Recording what a model asks for, and the file that it is kept in."""

import json
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import evoattn
from evoattn.families.registry import load_space
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import ConfigError, KernelConfig
from evoattn.ops.attention import attention
from evoattn.ops.explain import RecordedKernel, load
from evoattn.ops.sdpa import capture, sdpa
from evoattn.ops.shapes import Shapes, ShapesError
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import WGMMA, FakeDevice, fake_runtime, near, reference, tensors

SHAPE = "B=1,H=4,S=128,D=64,mask=causal"


def record(storage, config=None, cost=1.0, shape=SHAPE):
    """A right trial of flash_wgmma in a study of its own."""
    space = load_space("flash_wgmma", GPUS["h100"])
    name = f"s{len(storage.studies())}"
    problem = parse_shape(shape)
    study = storage.create_study(name, problem, GPUS["h100"], True, "random", 0, ("flash_wgmma",), {}, {})
    evaluation = Evaluation(TrialState.ESTIMATED, "", CompileInfo(), relative_cost=cost)
    return storage.record(study, config or space.make_config(WGMMA), None, evaluation), study


def test_the_recorded_kernel_answers_and_nothing_else_does(storage, tmp_path):
    device = FakeDevice()
    kernel = RecordedKernel(*record(storage), lambda pick: fake_runtime(device, tmp_path, pick))
    q, k, v = tensors(seqlen_q=37, seqlen_k=37)
    answer = kernel(q, k, v, is_causal=True, enable_gqa=True)
    assert near(answer, reference(q, k, v, is_causal=True)) and device.launches
    assert near(kernel(q, k, v, causal=True, enable_gqa=True), answer)
    assert kernel.trial == 1 and kernel.family == "flash_wgmma" and "BLOCK_M=64" in repr(kernel)
    out = torch.empty_like(q)
    assert kernel(q, k, v, is_causal=True, enable_gqa=True, out=out) is out and near(out, answer)
    with pytest.raises(NoKernel, match="transform"):
        torch.func.vmap(lambda a, b, c: kernel(a, b, c, is_causal=True, enable_gqa=True))(q[None], k[None], v[None])
    for other in (
        dict(is_causal=False),
        dict(is_causal=True, dtype=torch.bfloat16),
        dict(is_causal=True, head_dim=128),
    ):
        causal = other.pop("is_causal")
        with pytest.raises(NoKernel):
            kernel(*tensors(seqlen_q=37, seqlen_k=37, **other), is_causal=causal, enable_gqa=True)


def test_a_recorded_variant_answers_as_the_op_does(storage, tmp_path):
    device = FakeDevice()
    shape = "B=1,H=4,S=128,D=64,mask=causal,window=9:0,sink=1"
    kernel = RecordedKernel(*record(storage, shape=shape), lambda pick: fake_runtime(device, tmp_path, pick))
    (q, k, v), sinks = tensors(seqlen_q=37, seqlen_k=37), torch.linspace(-1, 1, 4).half()
    words = dict(is_causal=True, enable_gqa=True, scale=0.2, window=(5, 0), sinks=sinks)
    answer = kernel(q, k, v, **words)
    assert device.launches and near(answer, evoattn.attention(q, k, v, **words))
    with torch.autocast("cpu", dtype=torch.float16):
        assert near(kernel(q.float(), k.float(), v.float(), **words), answer)
    for other in ({"sinks": None}, {"window": None}, {"softcap": 3.0}, {"is_causal": False, "window": (5, 2)}):
        with pytest.raises(NoKernel):
            kernel(q, k, v, **(words | other))
    with pytest.raises(ValueError, match="causal must be True, False"):
        kernel(q, k, v, **words, causal="sideways")
    with pytest.raises(ValueError, match="sinks must have one value"):
        kernel(q, k, v, **(words | {"sinks": sinks[:2]}))


@pytest.mark.slow
def test_a_windowed_kernel_serves_calls_that_the_window_hides_nothing_of(storage, tmp_path):
    """Of fewer keys than the window has, and of one query, such a call says neither window nor mask."""
    shape = "B=1,H=4,S=128,D=64,mask=causal_lower_right,window=40:0"
    kernel = RecordedKernel(*record(storage, shape=shape), lambda pick: fake_runtime(FakeDevice(), tmp_path, pick))
    words = dict(causal=True, enable_gqa=True, window=(40, 0))
    for lengths in (dict(seqlen_q=37, seqlen_k=37), dict(seqlen_q=1, seqlen_k=30), dict(seqlen_q=1, seqlen_k=99)):
        q, k, v = tensors(**lengths)
        assert near(kernel(q, k, v, **words), evoattn.attention(q, k, v, **words)), lengths
    with pytest.raises(NoKernel):
        kernel(*tensors(seqlen_q=50, seqlen_k=50), **(words | {"window": None}))


def test_a_kernel_is_loaded_by_number_study_or_shape(storage, tmp_path):
    record(storage, cost=2.0)
    record(storage, cost=3.0)
    record(storage, cost=1.0, shape="B=1,H=4,S=128,D=128")
    db = str(tmp_path / "db.sqlite")
    assert evoattn.load is load
    assert load(db=db).trial == load("best", db=db).trial == load(3, db=db).trial == 3
    assert load(2, db=db).trial == load(study="s1", db=db).trial == 2
    assert load(shape=SHAPE, db=db).trial == load(shape=SHAPE, gpu="h100", db=db).trial == 1
    assert load(shape=parse_shape(SHAPE), db=tmp_path / "db.sqlite").trial == 1
    wrong = (dict(study=1), dict(shape=1), dict(gpu=1, shape=SHAPE), dict(study="s1", shape=SHAPE))
    for words in (dict(trial=9), dict(study="x"), dict(shape="B=1"), *wrong):
        with pytest.raises(WrongUse):
            load(**words, db=db)


def test_a_config_that_the_search_space_lacks_is_refused(storage):
    trial, study = record(storage, KernelConfig("flash_wgmma", {"BLOCK_M": 1}))
    with pytest.raises(ConfigError):
        RecordedKernel(trial, study)


TORCHS = F.scaled_dot_product_attention


def test_calls_of_both_kinds_are_counted(device):
    q, k, v = tensors()
    with capture() as shapes:
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        assert near(attention(q, k, v, enable_gqa=True), reference(q, k, v))
        with sdpa():
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        F.scaled_dot_product_attention(q, k, v, torch.zeros(37, 45, dtype=torch.float16), enable_gqa=True)
        attention(q.double(), k.double(), v.double(), enable_gqa=True)
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert F.scaled_dot_product_attention is TORCHS
    counts = {entry.problem.mask: entry.count for entry in shapes.entries}
    assert counts == {"causal_upper_left": 3, "full": 2}
    assert next(iter(shapes)) == AttentionProblem(2, 4, 2, 37, 45, 64, "fp16", "causal_upper_left")
    assert shapes.missed["it has a mask tensor"] == 1
    assert any("float64" in why for why in shapes.missed)
    assert "     3 calls  " in shapes.describe() and "     1 call that no kernel serves" in shapes.describe()


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
def test_causal_masks_of_torch_are_counted_once(device, on, made):
    q, k, v = tensors(kv_heads=4)
    kind = "causal_upper_left" if made is causal_upper_left else "causal_lower_right"
    with capture() as shapes, sdpa(on):
        F.scaled_dot_product_attention(q, k, v, made(37, 45))
        attention(q, k, v, attn_mask=made(37, 45))
        F.scaled_dot_product_attention(q, k, v, made(37, 45), dropout_p=0.5)
    assert [(entry.problem.mask, entry.count) for entry in shapes.entries] == [(kind, 2)]
    assert shapes.missed == {"it has dropout": 1}


def test_masks_are_counted_as_what_the_op_makes_of_them(device):
    q, k, v = tensors()
    numbers = torch.zeros(37, 45, dtype=torch.float16)
    with capture() as shapes:
        attention(q, k, v, enable_gqa=True, attn_mask=numbers == 0)
        attention(q, k, v, enable_gqa=True, attn_mask=numbers)
        attention(q, k, v, enable_gqa=True, attn_mask=numbers.float())  # which no kernel takes beside float16
    assert [(entry.problem.bias, entry.count) for entry in shapes.entries] == [("s", 2)]
    assert shapes.missed == {"attn_mask is torch.float32 beside torch.float16, which kernels would round": 1}


def test_blocks_nest_and_threads_are_apart(device):
    q, k, v = tensors()
    with capture() as outer:
        with pytest.raises(KeyError), capture() as inner:
            attention(q, k, v, enable_gqa=True)
            raise KeyError
        attention(q, k, v, enable_gqa=True)
        thread = threading.Thread(target=lambda: attention(q, k, v, enable_gqa=True))
        thread.start()
        thread.join()
    assert [entry.count for entry in inner.entries] == [1]
    assert [entry.count for entry in outer.entries] == [2]
    assert F.scaled_dot_product_attention is TORCHS


def test_autocasts_dtype_is_what_is_asked_for(device):
    q, k, v = (t.float() for t in tensors())
    with capture() as shapes, torch.autocast("cpu", dtype=torch.bfloat16):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        attention(q, k, v, enable_gqa=True)
    assert [(entry.problem.dtype, entry.count) for entry in shapes.entries] == [("bf16", 2)]


class Event:
    """A CUDA event at a time in ms, of a stream of its own: until it is waited for it has not been reached."""

    def __init__(self, ms):
        self.ms, self.reached = ms, False

    def elapsed_time(self, end):
        assert end.reached
        return end.ms - self.ms

    def synchronize(self):
        self.reached = True


def test_a_first_call_that_compiles_counts_no_more_than_others():
    shapes = Shapes()
    entry = shapes.add(AttentionProblem(1, 2, 2, 64, 64, 64), 3)
    entry.spans += [(Event(0.0), Event(1500.0)), (Event(1500.0), Event(1500.05)), (Event(1501.0), Event(1501.06))]
    assert shapes.entries[0].us == pytest.approx(60)
    entry.spans += [(Event(0.0), Event(1500.0)), (Event(1.0), Event(1.04))]
    assert shapes.entries[0].us == pytest.approx(40), "of two calls the second one"


def test_a_file_and_back(tmp_path):
    shapes = Shapes()
    small, large = AttentionProblem(1, 2, 2, 64, 64, 64), AttentionProblem(1, 8, 8, 999, 999, 128, "bf16", lse=True)
    shapes.add(small, 10, 5.0)
    shapes.add(large, 2, 100.0)
    shapes.miss("it has dropout")
    shapes.save(tmp_path / "SHAPES.json")
    rows = json.loads((tmp_path / "SHAPES.json").read_text())["shapes"]
    assert [row["share"] for row in rows] == [0.8, 0.2]
    again = Shapes.load(tmp_path / "SHAPES.json")
    assert list(again) == [large, small]
    assert [(e.count, e.us) for e in again.entries] == [(2, 100.0), (10, 5.0)]
    assert again.share(again.entries[0]) == pytest.approx(0.8)
    assert again.missed == {"it has dropout": 1}
    assert repr(again) == "Shapes(problems=2, calls=12, missed=1)"


def test_a_block_without_a_call_of_attention_says_so():
    with capture() as shapes:
        torch.zeros(3).sum()
    assert shapes.describe().startswith("No call of attention was seen")


def test_layers_of_torch_that_call_no_sdpa_are_spoken_of():
    """As in `eval()` they take an operator of their own."""
    heads, given = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval(), torch.randn(1, 4, 16)
    seen = []
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        for fast in (True, False):
            torch.backends.mha.set_fastpath_enabled(fast)
            with capture() as shapes, torch.no_grad():
                heads(given)
            seen.append((len(shapes), "set_fastpath_enabled(False)" in shapes.describe()))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert seen == [(0, True), (1, False)]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "Expecting value"),
        ("[]", "has no `shapes`"),
        ('{"shapes": {}}', "are no list"),
        ('{"shapes": [{}]}', "entry 1 has no `problem`"),
        ('{"shapes": [{"problem": "seed_s64"}, {"problem": 3}]}', "entry 2 has no `problem`"),
        ('{"shapes": [{"problem": {"batch": 1}}]}', "a problem without heads, kv_heads, seqlen_q, seqlen_k, head_dim"),
        ('{"shapes": [{"problem": {"B": 1}}]}', "a problem with 'B', which no problem has"),
        ('{"shapes": [{"problem": "seed_s64", "calls": "x"}]}', "entry 1 has calls='x'"),
        ('{"shapes": [{"problem": "seed_s64", "calls": -1}]}', "entry 1 has calls=-1"),
        ('{"shapes": [{"problem": "seed_s64", "us": -1}]}', "entry 1 has us=-1"),
        ('{"shapes": [{"problem": "seed_s46"}]}', "Unknown problem 'seed_s46'"),
        ('{"shapes": [], "version": 2}', "it is of version 2, and this evoattn reads 1"),
        (None, "No such file"),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, text, said):
    path = tmp_path / "SHAPES.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ShapesError, match=r"^The shapes in .* cannot be read: ") as error:
        Shapes.load(path)
    assert "\n" not in str(error.value) and said in str(error.value)


def test_a_file_by_hand_needs_no_more_than_a_shape(tmp_path):
    path = tmp_path / "SHAPES.json"
    path.write_text('{"shapes": [{"problem": "seed_s64", "calls": 3}, {"problem": "B=1,H=2,S=96,D=32"}]}')
    assert [(e.problem.head_dim, e.count) for e in Shapes.load(path).entries] == [(64, 3), (32, 1)]


def test_the_file_is_plain(tmp_path):
    shapes = Shapes()
    shapes.add(AttentionProblem(1, 2, 2, 64, 64, 64), 10)
    shapes.save(tmp_path / "SHAPES.json")
    row = json.loads((tmp_path / "SHAPES.json").read_text())["shapes"][0]
    assert row["calls"] == 10
    assert row["problem"]["head_dim"] == 64


class Watching(torch.Tensor):
    """A subclass that answers to functions of torch itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "answered" if func is TORCHS or "attention" in getattr(func, "__name__", "") else NotImplemented


@pytest.mark.parametrize("on", [False, True])
def test_what_torch_takes_is_taken_inside_of_a_block_too(device, on):
    q, k, v = (torch.randn(2, 4, 5, 8) for _ in range(3))
    nested = [torch.nested.nested_tensor([one[0, :, :3], one[1]]) for one in (q, k, v)]
    expected = TORCHS(*nested)
    with sdpa(on), capture() as shapes:
        answer = F.scaled_dot_product_attention(*nested)
        assert F.scaled_dot_product_attention(q.as_subclass(Watching), k, v) == "answered"
        assert F.scaled_dot_product_attention(q, k, v.as_subclass(Watching)) == "answered"
    assert all(torch.equal(one, other) for one, other in zip(answer.unbind(), expected.unbind(), strict=True))
    assert not len(shapes) and sum(shapes.missed.values()) == 3


@pytest.mark.parametrize("text", ['{"shapes": [], "missed": {"a": 1e999}}', "[" * 100_000])
def test_numbers_and_depths_that_no_file_of_ours_has_are_a_sentence(tmp_path, text):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ShapesError, match="cannot be read"):
        Shapes.load(path)
