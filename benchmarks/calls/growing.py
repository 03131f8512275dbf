"""What a call of `evoattn.attention` costs the CPU while a cache grows by one key with every call, beside SDPA.

    python -m benchmarks.calls.growing [KIND …] [--keys 4060] [--tokens 60] [--estimated] [--no-device GPU] [--json F]

Each length is called twice, by each implementation in turn: the first call is of a new length, the second of one that
is known. µs of a call that the GPU is given without waiting: medians, and of new lengths the mean and the most. Calls
that load a kernel (compiled first, if it is not in the cache) are counted apart, with their seconds. Climbs are those
that this process made, none of them is read from disk.

SDPA is asked where it needs no mask tensor: as it comes, and by one backend alone. With `--no-device h100` no GPU is
needed: the CPU time of all that is not CUDA's, of kernels of that GPU, without SDPA.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evoattn
from benchmarks.calls.no_device import NoDevice, no_code
from evoattn.backends.cubins import Cubin, get_cubin
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import cubin_cache
from evoattn.model.problem import AttentionProblem
from evoattn.ops.choice import Picked
from evoattn.ops.runtime import FOLDER, Runtime, current, find_platform
from evoattn.portfolio.climb import ClimbCache, Climbed, Key
from evoattn.portfolio.pick import lasting_pick, next_picks

KINDS: dict[str, dict[str, Any]] = {
    "heads": dict(heads=32, kv_heads=32, dim=128),
    "llama": dict(heads=32, kv_heads=8, dim=128),
    "mistral": dict(heads=32, kv_heads=8, dim=128, window=(4095, -1)),
    "gpt-oss, window": dict(heads=64, kv_heads=8, dim=64, window=(127, -1), sinks=True),
    "gpt-oss, full": dict(heads=64, kv_heads=8, dim=64, sinks=True),
    "gemma 2": dict(heads=16, kv_heads=8, dim=256, softcap=50.0),
    "gemma 3, window": dict(heads=8, kv_heads=4, dim=256, window=(1023, -1)),
    "gemma 4, full": dict(heads=16, kv_heads=8, dim=512),
    "deepseek, latent": dict(heads=128, kv_heads=1, dim=576, value_dim=512),
    "deepseek, 192/128": dict(heads=128, kv_heads=128, dim=192, value_dim=128),
}
"""Of one layer's decoding."""
BACKENDS = {"sdpa": None, "sdpa flash": SDPBackend.FLASH_ATTENTION, "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION}


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Counted(ClimbCache):
    """What climbs came to, and how many were made."""

    count = 0

    def add(self, key: Key, climbed: Climbed) -> None:
        self.count += 1
        super().add(key, climbed)


@dataclass
class Op:
    """The runtime that is timed: what it loaded, and what its picks climbed."""

    no_device: str
    estimated: bool
    climbs: Counted = field(default_factory=Counted)
    loads: int = 0

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        platform: Any = NoDevice(self.no_device) if self.no_device else find_platform()
        with tempfile.TemporaryDirectory() as own:
            folder = Path(own) if self.no_device else cubin_cache() / FOLDER
            runtime = Runtime(platform, self._pick, folder, self._build, next_picks)
            runtime.estimated = self.estimated
            with current.use(runtime):
                yield

    def _pick(self, problem: AttentionProblem, gpu: GpuSpec) -> Picked | None:
        return current.wins().find(problem, gpu) or lasting_pick(problem, gpu, self.climbs)

    def _build(self, *arguments: Any) -> Cubin:
        self.loads += 1
        return (no_code if self.no_device else get_cubin)(*arguments)


def call_of(kind: dict[str, Any], keys: int, memory: torch.Tensor) -> tuple[Inputs, dict[str, Any]]:
    """Tensors and keywords of a call of `evoattn.attention` of so many keys, K and V in one piece each."""
    heads, kv_heads, dim = kind["heads"], kind["kv_heads"], kind["dim"]
    value_dim = kind.get("value_dim", dim)
    query, key = (
        memory[: heads * dim].view(1, heads, 1, dim),
        memory[: kv_heads * keys * dim].view(1, kv_heads, keys, dim),
    )
    value = (
        key[..., :value_dim] if kv_heads == 1 else memory[-kv_heads * keys * value_dim :].view(1, kv_heads, keys, -1)
    )
    keywords: dict[str, Any] = {name: kind[name] for name in ("window", "softcap") if name in kind}
    if kind.get("sinks"):
        keywords["sinks"] = memory[:heads]
    return (query, key, value), keywords | dict(enable_gqa=heads != kv_heads)


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, **others: Any
) -> torch.Tensor | None:
    """Torch's answer; None where the backend that is pinned gives none."""
    try:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=enable_gqa)
    except RuntimeError:
        return None


def backends_of(kind: dict[str, Any], no_device: str) -> list[str]:
    """Those of SDPA that take a call."""
    if no_device or any(name in kind for name in ("window", "softcap", "sinks")):
        return []
    return list(BACKENDS)


def measure(kind: dict[str, Any], keys: int, tokens: int, no_device: str, estimated: bool) -> dict[str, Any]:
    """All times of one kind."""
    op, device = Op(no_device, estimated), "cpu" if no_device else "cuda"
    clock = time.process_time if no_device else time.perf_counter
    wait: Callable[[], None] = (lambda: None) if no_device else torch.cuda.synchronize
    most = kind["heads"] * (keys + tokens) * kind["dim"]
    memory = torch.zeros(2 * most // 64 * 64 + 4096, dtype=torch.bfloat16, device=device)
    names = ["evoattn", *backends_of(kind, no_device)]
    times: dict[str, dict[str, list[float]]] = {name: {"new": [], "known": []} for name in names}
    loading: list[float] = []
    with op.used():
        tensors, keywords = call_of(kind, keys, memory)
        said = evoattn.explain(*tensors, **keywords)
        if no_device and said.startswith("SDPA runs"):  # which would compute on the CPU
            return {"climbs": op.climbs.count, "loads": 0, "loading_s": 0.0, "runs": said}
        for length in range(keys, keys + tokens):
            tensors, keywords = call_of(kind, length, memory)
            for name in list(times):
                for what in ("new", "known"):
                    pinned = sdpa_kernel(backend) if (backend := BACKENDS.get(name)) else contextlib.nullcontext()
                    call: Callable[..., Any] = evoattn.attention if name == "evoattn" else sdpa
                    loads = op.loads
                    with pinned:
                        wait()
                        begun = clock()
                        served = call(*tensors, **keywords)
                        took = clock() - begun
                    if served is None:
                        del times[name]
                        break
                    if op.loads > loads:
                        loading.append(took)
                    else:
                        times[name][what].append(took * 1e6)
    row: dict[str, Any] = {name: {
        "known": statistics.median(found["known"]), "new": statistics.median(found["new"]),
        "mean": statistics.mean(found["new"]), "most": max(found["new"]),
    } for name, found in times.items()}  # fmt: skip
    return row | dict(climbs=op.climbs.count, loads=len(loading), loading_s=sum(loading), runs=said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all unless given")
    parser.add_argument("--keys", type=int, default=4060, help="of the first length")
    parser.add_argument("--tokens", type=int, default=60, help="lengths, one after another")
    parser.add_argument("--estimated", action="store_true", help="also kernels that were measured on no GPU like this")
    parser.add_argument("--no-device", default="", metavar="GPU")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"{', '.join(sorted(unknown))}: the kinds are {', '.join(KINDS)}")
    rows = {}
    with torch.no_grad():
        for kind in arguments.kinds or KINDS:
            row = measure(KINDS[kind], arguments.keys, arguments.tokens, arguments.no_device, arguments.estimated)
            rows[kind] = row
            print(f"{kind}: {row['climbs']} climbs, {row['loads']} kernels loaded in {row['loading_s']:.1f} s")
            for name, found in row.items():
                if isinstance(found, dict):
                    print(f"  {name:15}" + "  ".join(f"{what} {us:.0f}" for what, us in found.items()))
            print(f"  {row['runs']}", flush=True)
    machine = f"no {arguments.no_device}" if arguments.no_device else torch.cuda.get_device_name()
    print(f"{machine}, torch {torch.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
