"""`flash_attn_combine` by a kernel of the family merge_parts: pointers, counts and strides that arrive on a device."""

import ctypes
import math

import pytest
import torch

from evoattn import flash_attn
from evoattn.families.registry import load_space
from evoattn.ops.runtime import current
from tests.ops.fake_device import TORCH, FakeDevice, Pick, fake_runtime, near
from tests.ops.fake_variants import tensor_at

POINTERS, COUNTS, STRIDES = 4, 4, 7


class MergeDevice(FakeDevice):
    """Adds up what the arguments of a launch point to."""

    def launch(self, config, function, arguments, _):
        types = [ctypes.c_uint64] * POINTERS + [ctypes.c_int32] * COUNTS + [ctypes.c_int64] * STRIDES
        places = (ctypes.c_void_p * len(types)).from_address(arguments.value or 0)
        values = [kind.from_address(at).value for at, kind in zip(places, types, strict=True)]
        (at_parts, at_sums, at_o, at_lse), (count, rows, heads, queries) = values[:4], values[4:8]
        shape = rows // (heads * queries), heads, queries
        kernel, name = self._functions[(function.value or 0) - 1]
        dim, dtype = kernel["head_dim"], TORCH[kernel["dtype"]]
        read = dtype if self.narrow else torch.float32
        parts = tensor_at(at_parts, (count, *shape, dim), (*values[8:12], 1), read).double()
        sums = tensor_at(at_sums, (count, *shape), (rows, heads * queries, queries, 1), torch.float32).double()
        weights = torch.softmax(sums, 0).nan_to_num(0)[..., None]
        merged = (parts * weights).masked_fill(weights == 0, 0).sum(0)
        tensor_at(at_o, (*shape, dim), (*values[12:15], 1), dtype).copy_(merged + self.error)
        tensor_at(at_lse, shape, (heads * queries, queries, 1), torch.float32).copy_(torch.logsumexp(sums, 0))
        self.launches.append(name)
        return 0

    narrow = False


def runtime_of(device, folder):
    config = load_space("merge_parts", device.gpu).starting_configs()[0]
    return fake_runtime(device, folder, lambda problem, gpu: Pick("merge_parts", config, estimated=True))


def drawn(dtype):
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(3, 5, 7, 2, 16, generator=generator).to(dtype)
    sums = torch.randn(3, 5, 7, 2, generator=generator)
    sums[1, 0], parts[1, 0] = -math.inf, math.nan
    return parts, sums


@pytest.mark.parametrize("narrow", [False, True])
def test_a_kernel_adds_them_up(tmp_path, narrow):
    device = MergeDevice()
    device.narrow = narrow
    parts, sums = drawn(torch.bfloat16 if narrow else torch.float32)
    expected, expected_lse = flash_attn.flash_attn_combine(parts, sums, out_dtype=torch.bfloat16)
    with current.use(runtime_of(device, tmp_path)):
        for mine in (None, torch.empty(5, 7, 2, 16, dtype=torch.bfloat16)):
            device.launches.clear()
            out, lse = flash_attn.flash_attn_combine(parts, sums, mine, torch.bfloat16)
            assert device.launches and near(out, expected) and near(lse, expected_lse)
            assert mine is None or out is mine
        assert len(device.launches) == 1 and device.loads == 1


def test_what_no_kernel_reads_is_torch_s(tmp_path):
    device = MergeDevice()
    parts, sums = drawn(torch.float32)
    expected, _ = flash_attn.flash_attn_combine(parts, sums)
    apart = torch.empty(3, 5, 7, 2, 32)[..., ::2].copy_(parts)
    with current.use(runtime_of(device, tmp_path)):
        assert near(flash_attn.flash_attn_combine(apart, sums)[0], expected)
        assert near(flash_attn.flash_attn_combine(parts, sums.double())[0], expected)
        wanted = parts.clone().requires_grad_()
        assert flash_attn.flash_attn_combine(wanted, sums)[0].requires_grad
        flash_attn.flash_attn_combine(parts[..., :3].contiguous(), sums)
        flash_attn.flash_attn_combine(parts[:, :0], sums[:, :0])
        with pytest.raises(RuntimeError):
            flash_attn.flash_attn_combine(parts, sums, torch.empty(5, 7, 2, 8))
    assert not device.launches


def test_a_kernel_that_is_wrong_is_not_used(tmp_path):
    device = MergeDevice(error=0.5)
    parts, sums = drawn(torch.float32)
    expected, _ = flash_attn.flash_attn_combine(parts, sums)
    with current.use(runtime_of(device, tmp_path)), pytest.warns(RuntimeWarning, match="failed its check"):
        assert near(flash_attn.flash_attn_combine(parts, sums)[0], expected)
