"""What a call of `evoattn.attention` costs beside SDPA: CPU time of eager and compiled calls, and device time in CUDA
graphs.

python scripts/op_overhead.py [SHAPE …] [--json FILE]

One process, all calls in turns, so that both meet the same clocks. CPU time: from the first to the last of a burst of
calls that the GPU is given without waiting, the median over the bursts, a call. Device time: a graph of many calls,
replayed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evoattn
from evoattn.correctness.reference import make_inputs
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.ops import current

SHAPES = [
    "B=1,H=8,S=128,D=64,dtype=fp16,mask=full",
    "B=1,H=16,S=1024,D=64,dtype=fp16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,S=1024,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,Sq=1,Sk=2048,D=128,dtype=bf16,mask=full",
]
BURST, BURSTS, IN_GRAPH = 40, 60, 20
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Call = Callable[[], object]


def host_us(calls: dict[str, Call]) -> dict[str, float]:
    """Median CPU time of each call in µs, bursts in turns."""
    bursts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BURSTS):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(BURST):
                call()
            bursts[name].append((time.perf_counter() - started) / BURST * 1e6)
    return {name: statistics.median(times) for name, times in bursts.items()}


def device_us(call: Call) -> float:
    """Device time of a call in µs, out of a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            call()
    times = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / IN_GRAPH * 1e3)
    return statistics.median(times[5:])


def refuses(call: Call) -> bool:
    try:
        call()
    except RuntimeError:
        return True
    return False


def measure(problem: AttentionProblem) -> dict[str, object]:
    """All times of one problem."""
    tensors = make_inputs(problem, 1, "cuda")
    q, k, v = (tensors[name] for name in "qkv")
    causal, grouped = problem.mask != "full", problem.kv_heads != problem.heads

    def ours() -> object:
        return evoattn.attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def torchs() -> object:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def pinned(backend: SDPBackend) -> Call:
        def call() -> object:
            with sdpa_kernel(backend):
                return torchs()

        return call

    backends = {name: pinned(backend) for name, backend in BACKENDS.items()}
    backends = {name: call for name, call in backends.items() if not refuses(call)}
    compiled_ours, compiled_torchs = torch.compile(ours), torch.compile(torchs)
    calls: dict[str, Call] = {"evoattn": ours, "sdpa": torchs, "evoattn op": lambda: through_op(q, k, v, causal)}
    compiled: dict[str, Call] = {"evoattn compiled": compiled_ours, "sdpa compiled": compiled_torchs}
    for call in (*calls.values(), *compiled.values()):
        call()
    host = host_us(calls)
    for name, backend in BACKENDS.items():  # the choice of a backend stands outside of the timed calls
        if name in backends:
            with sdpa_kernel(backend):
                host |= host_us({f"sdpa {name}": torchs})
    device = {name: device_us(call) for name, call in {"evoattn": ours, **backends}.items()}
    return {
        "problem": problem.describe(),
        "runs": evoattn.explain(q, k, v, is_causal=causal, enable_gqa=grouped),
        "host_us": host | host_us(compiled),
        "graph_us": device,
    }


def through_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> object:
    """The custom op that compiled code calls."""
    return torch.ops.evoattn.attention(q, k, v, causal, "upper_left", None, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--estimated", action="store_true", help="also run kernels that were measured on no GPU like this"
    )
    arguments = parser.parse_args()
    current.runtime().estimated = arguments.estimated
    rows = []
    with torch.no_grad():
        for shape in arguments.shapes:
            row = measure(by_name_or_shape(shape))
            rows.append(row)
            print(f"\n{row['problem']}\n  {row['runs']}")
            for what in ("host_us", "graph_us"):
                times = row[what]
                assert isinstance(times, dict)
                print(f"  {what:9}" + "  ".join(f"{name} {value:.1f}" for name, value in times.items()))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
