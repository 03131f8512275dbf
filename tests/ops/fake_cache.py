"""The fake device that runs split_kv over keys in use and pages."""

import ctypes
import itertools
import math

import torch

from evoattn.backends.driver_launch import LaunchConfig
from evoattn.families.registry import load_space
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from tests.ops.fake_device import TORCH, FakeDevice, Pick
from tests.ops.fake_variants import changed, sequences, tensor_at, values_of

CONFIG = {
    **dict(COMPUTE="fma", LOAD="registers", BLOCK_M=4, BLOCK_N=32, WARPS=2, STAGES=1, VECTOR_BYTES=16, DOT_LANES=8),
    **dict(SPLITS=1, MERGE="kernel", DEPENDENT_LAUNCH="none", BLOCKS_PER_SM=1),
}
SPLIT_KV = [ctypes.c_uint64] * 4 + [ctypes.c_int32] * 4 + [ctypes.c_int64] * 12 + [ctypes.c_float]
SPLIT_KV += [ctypes.c_int32] * 4 + [ctypes.c_uint64] * 3
"""The arguments of split_kv before those of variants."""


class CacheDevice(FakeDevice):
    """Computes what the arguments of a launch of split_kv say of keys in use and pages."""

    def launch(self, config, function, arguments, _):
        if self.status:
            return self.status
        kernel, name = self._functions[(function.value or 0) - 1]
        values = values_of(kernel, SPLIT_KV, arguments.value)
        heads, kv_heads, seqlen_q, seqlen_k = values[4:8]
        batch, dtype, dim = LaunchConfig.from_address(config.value).grid_z, TORCH[kernel["dtype"]], kernel["head_dim"]
        strides = [(*values[8 + 3 * i : 11 + 3 * i], 1) for i in range(4)]
        scale, others = values[20] / math.log2(math.e), values[28:]
        seqused, table, page_bits, table_pages = others[11:15]
        if "varlen" in kernel["variants"]:
            packed = sequences(others)
            whole = (1, heads, packed[-1][0].stop, dim)
            all_q, all_o = (tensor_at(values[i], whole, strides[i], dtype) for i in (0, 3))
            q, o = ([tensor[0, :, rows] for rows, _ in packed] for tensor in (all_q, all_o))
            lengths = [keys.stop - keys.start for _, keys in packed]
        else:
            q, o = (tensor_at(values[i], (batch, heads, seqlen_q, dim), strides[i], dtype) for i in (0, 3))
            lengths = tensor_at(seqused, (batch,), (1,), torch.int32).tolist()
        if "appended" in kernel["variants"]:
            addresses, new_strides, pages = values[-8:-4], values[-4:-1], values[-1]
            for address, at, which in zip(addresses[:2], addresses[2:], (1, 2), strict=True):
                new = tensor_at(address, (batch, kv_heads, seqlen_q, dim), (*new_strides, 1), dtype)
                lying = (pages, kv_heads, 1 << page_bits, dim) if table else (batch, kv_heads, seqlen_k, dim)
                rows = tensor_at(table, (batch, table_pages), (table_pages, 1), torch.int32) if table else None
                cache = tensor_at(at, lying, strides[which], dtype).transpose(1, 2)
                for b, i in itertools.product(range(batch), range(seqlen_q)):
                    key = lengths[b] + i
                    row = (rows[b, key >> page_bits], key & ((1 << page_bits) - 1)) if table else (b, key)
                    cache[row] = new[b, :, i]
            lengths = [count + seqlen_q for count in lengths]
        for b, keys in enumerate(lengths):
            seqlen_q = q[b].shape[1]
            if not keys:
                o[b][:] = 0
            if not keys or not seqlen_q:
                continue
            if table:
                row = tensor_at(table, (batch, table_pages), (table_pages, 1), torch.int32)[b]
                pages = row[: -(-keys >> page_bits)].long()
                shape = (int(pages.max()) + 1, kv_heads, 1 << page_bits, dim)
                caches = (tensor_at(values[i], shape, strides[i], dtype)[pages] for i in (1, 2))
                k, v = (t.transpose(0, 1).flatten(1, 2)[:, :keys] for t in caches)
            else:
                shape = (batch, kv_heads, seqlen_k, dim)
                k, v = (tensor_at(values[i], shape, strides[i], dtype)[b, :, :keys] for i in (1, 2))
            k, v = (t.double().repeat_interleave(heads // kv_heads, dim=0) for t in (k, v))
            own = list(others[:11])
            own[2] += keys - seqlen_k
            own[7] += b * own[8] * dtype.itemsize
            products = q[b][None].double() @ k[None].transpose(-1, -2)
            scores, sinks = changed(products, kernel["variants"], kernel["mask"], own, dtype)
            scores = scores * scale
            if kernel["mask"] == "causal_lower_right":
                seen = torch.ones(seqlen_q, keys, dtype=torch.bool).tril(keys - seqlen_q)
                scores = scores.masked_fill(~seen, -math.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
                v = torch.cat((v, torch.zeros_like(v[:, :1])), 1)
            o[b][:] = (torch.softmax(scores, -1).nan_to_num(0) @ v)[0]
        self.launches.append(name)
        return 0


def split_kv_pick(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """One small kernel with one launch, for keys in use and pages alone."""
    if not (problem.seqused or problem.page):
        return None
    return Pick("split_kv", load_space("split_kv", gpu).make_config(CONFIG))
