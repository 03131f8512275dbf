"""Recording what a model asks for, and the file that it is kept in."""

import json
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from evoattn.model.problem import AttentionProblem
from evoattn.ops.attention import attention
from evoattn.ops.sdpa import capture, sdpa
from evoattn.ops.shapes import Shapes, ShapesError
from tests.ops.fake_device import near, reference, tensors

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
