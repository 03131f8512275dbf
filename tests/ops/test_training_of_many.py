"""Two processes train one model, by DDP and by FSDP: with `evoattn.attention` as with SDPA."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import evoattn
from evoattn.ops.runtime import current
from tests.ops.fake_backward import TrainingDevice, training_runtime

STEPS, RANKS, WIDTH, HEADS = 3, 2, 64, 4


class Layer(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            attended = self.attend(q, k, v, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2).float())


def trained(attend, way: str, rank: int) -> list[float]:
    """Losses of a few steps."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Layer(attend), Layer(attend))
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = (model(torch.randn(2, 24, WIDTH, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def work(rank: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    try:
        for way in ("ddp", "fsdp"):
            theirs = trained(F.scaled_dot_product_attention, way, rank)
            for kernels in (False, True):
                compare(rank, way, kernels, theirs, Path(folder) / f"kernels{rank}")
    finally:
        dist.destroy_process_group()


def compare(rank: int, way: str, kernels: bool, theirs: list[float], folder: Path) -> None:
    device = TrainingDevice()
    device._batch = 2
    with current.use(training_runtime(device, folder)) if kernels else contextlib.nullcontext():
        ours = trained(evoattn.attention, way, rank)
    assert len(device.backwards) == (2 * STEPS if kernels else 0)
    torch.testing.assert_close(ours, theirs, atol=2e-3 if kernels else 1e-6, rtol=0)
    assert ours[-1] < ours[0]


@pytest.mark.slow
def test_two_processes(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=RANKS)
