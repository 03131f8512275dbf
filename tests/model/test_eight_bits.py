"""Numbers of 8 bits and their scales: as problems say them, as inputs hold them, and what they stand for."""

import pytest
import torch

from evoattn.correctness import forward
from evoattn.correctness.eight_bits import dequantised, turn, turned_back
from evoattn.model.shape_text import parse_shape

SHAPE = "B=3,H=4,Hkv=2,Sq=30,Sk=50,D=16,dtype=bf16,lse=1,"
PROBLEMS = (
    "kv=e4m3",
    "kv=e5m2,scales=head,layout=bshd",
    "kv=int8,scales=token,layout=bshd",
    "kv=int8,scales=head,varlen=5:40",
    "kv=e4m3,scales=token,seqused=1:50,page=16",
    "kv=e4m3,scales=head,varlen=3:40,page=16",
    "kv=int8,scales=token,seqused=1:50,page=16,layout=bshd",
)


@pytest.mark.parametrize("words", PROBLEMS)
def test_inputs_are_as_their_specs_say_and_stand_for_normal_numbers(words):
    problem = parse_shape(SHAPE + words)
    assert parse_shape(problem.describe()) == problem
    tensors = forward.make_inputs(problem, 0, "cpu")
    for spec in problem.inputs:
        made = tensors[spec.name]
        assert (made.shape, made.stride(), made.dtype) == (spec.shape, spec.strides, getattr(torch, spec.dtype)), spec
    plain, meant = dequantised(problem, tensors, torch.float64)
    assert not plain.scale_shapes and meant["k"].dtype == torch.float64
    seen = meant["v"].nan_to_num(0)[meant["v"].abs() < 10]  # int8 has no NaN behind the last key
    assert 0.7 < seen.std() < 1.1
    assert problem.bytes < plain.bytes
    answer = forward.make_answer(problem, tensors, "extreme_terms", True)
    assert not answer["o"].values.isnan().any()


def test_a_scale_is_one_argument_whatever_it_is_of():
    blocks = parse_shape("B=2,H=4,Hkv=2,Sq=200,Sk=300,D=64,dtype=e4m3,scales=block,layout=bshd")
    assert [blocks.scale_shapes[f"{t}_scale"] for t in "qkv"] == [(2, 4, 2), (2, 2, 3), (2, 2, 3)]
    assert blocks.scale_strides("k_scale") == (6, 3, 1) and blocks.compiled_variants == ("scales=block",)
    strides = [parse_shape(f"{SHAPE}kv=e4m3{words}").scale_strides("k_scale") for words in ("", ",scales=head")]
    assert strides == [(0, 0, 0), (2, 1, 0)]
    assert parse_shape(f"{SHAPE}kv=e4m3,scales=token").scale_strides("v_scale") == (100, 50, 1)
    assert parse_shape(f"{SHAPE}kv=e4m3,scales=token,layout=bshd").scale_strides("v_scale") == (100, 1, 2)
    latent = (
        "B=5,H=16,Hkv=1,Sq=2,Sk=96,D=576,Dv=512,dtype=bf16,rotary_apart=1,seqused=2:96,page=16,kv=e4m3,scales=columns"
    )
    of_columns = [parse_shape(f"{latent},layout={layout}").scale_strides("v_scale") for layout in ("bshd", "bhsd")]
    assert of_columns == [(64, 4, 4), (64, 64, 4)]
    kinds = {parse_shape(f"{SHAPE}kv=e4m3{words}").compiled_variants for words in ("", ",scales=head")}
    assert kinds == {("kv=e4m3",)}


def test_queries_of_eight_bits_have_a_scale_and_an_answer_of_sixteen():
    problem = parse_shape("B=2,H=4,Hkv=2,S=64,D=64,dtype=fp8,kv=e4m3,scales=head")
    assert problem.kv == "" and problem.outputs[0].dtype == "bfloat16"
    assert [spec.name for spec in problem.inputs] == ["q", "k", "v", "q_scale", "k_scale", "v_scale"]
    assert problem.scale_shapes["q_scale"] == (2, 2)


def test_keys_along_rows_are_the_same_numbers():
    problem = parse_shape("B=2,H=4,Hkv=2,Sq=64,Sk=50,D=64,Dv=32,dtype=e4m3,turned=1")
    assert parse_shape(problem.describe()) == problem and problem.shape("v") == (2, 2, 50, 32)
    tensors = forward.make_inputs(problem, 0, "cpu")
    assert tensors["v"].shape == problem.inputs[2].shape == (2, 2, 32, 64)
    numbers = turned_back(tensors["v"], 50)
    assert torch.equal(turn(numbers).float(), tensors["v"].float())
    assert torch.equal(tensors["v"][0, 1, 3, :8].float(), numbers[0, 1, [0, 1, 8, 9, 2, 3, 10, 11], 3].float())
    assert not turned_back(tensors["v"], 64)[:, :, 50:].float().any()
    assert torch.equal(dequantised(problem, tensors, torch.float64)[1]["v"], numbers.double() * tensors["v_scale"])
