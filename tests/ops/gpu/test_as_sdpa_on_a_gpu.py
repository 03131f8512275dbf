"""The edge calls of `test_as_sdpa.py` on a GPU."""

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.ops.runtime import Runtime, current
from tests.ops.edge_calls import HIDDEN_ROW, Calls, difference, outcome, torchs
from tests.ops.gpu.gpu_problems import ON_A_GPU

pytestmark = ON_A_GPU


@pytest.fixture(scope="module")
def calls():
    return Calls("cuda").all()


@pytest.mark.parametrize("name", sorted(set(Calls("cpu").all()) - {"odd start"}))
def test_the_op_does_what_sdpa_does(calls, name):
    """Of tensors without elements, and of a mask of one column, what it does on a CPU: its kernels divide by their
    sizes, or load from addresses that they cannot load from, after which the device fails at anything. Of a row that a
    bool mask hides, what it does with -inf: the two differ in torch 2.11 on an H100."""
    of_nothing = any(isinstance(tensor, torch.Tensor) and not tensor.numel() for tensor in calls[name][0])
    on_a_cpu = of_nothing or name == "mask [9, 1]"
    asked = f"{name} of numbers" if name == f"mask {HIDDEN_ROW}" else name
    expected = torchs(Calls("cpu").all()[asked] if on_a_cpu else calls[asked])
    expected = expected.cuda() if on_a_cpu and isinstance(expected, torch.Tensor) else expected
    assert difference(outcome(evoattn.attention, calls[name]), expected) == ""
    torch.cuda.synchronize()


def test_a_mask_of_one_column_that_no_kernel_takes(tmp_path):
    call = Calls("cuda").all()["mask [9, 1]"]
    with current.use(Runtime(CudaPlatform(), lambda problem, gpu: None, tmp_path)):
        answer = evoattn.attention(*call[0], **call[1])
    torch.cuda.synchronize()
    assert difference(answer, torchs(Calls("cpu").all()["mask [9, 1]"]).cuda()) == ""


@pytest.mark.parametrize("words", [{}, {"is_causal": True}])
def test_a_query_of_nan_spoils_its_own_row_alone(words):
    q, k, v = Calls("cuda").qkv()
    expected = evoattn.attention(q, k, v, **words, strict=True)
    q[1, 2, 3] = float("nan")
    answer = evoattn.attention(q, k, v, **words, strict=True)
    assert answer[1, 2, 3].isnan().all()
    answer[1, 2, 3] = expected[1, 2, 3]
    assert (answer == expected).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dim", [20, 48, 64, 128])
@pytest.mark.parametrize("place", ["odd start", "odd rows"])
def test_what_lies_at_odd_places_is_served(dtype, dim, place):
    """Torch's own kernels would read it by misaligned loads, after which the device cannot be used any more."""
    shape = 2, 4, 33, dim
    if place == "odd start":
        tensors = [torch.randn(2 * 4 * 33 * dim + 3, device="cuda").to(dtype)[3:].view(shape) for _ in "qkv"]
    else:
        tensors = [torch.randn(2, 4, 33, dim + 3, device="cuda").to(dtype)[..., :dim] for _ in "qkv"]
    answer = evoattn.attention(*tensors)
    torch.cuda.synchronize()
    expected = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors))
    assert (answer.double() - expected).abs().max() < 2e-2
