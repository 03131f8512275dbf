"""What a call of `evoattn.attention` costs beside SDPA: CPU time of eager and compiled calls, and device time in CUDA
graphs.

    python -m benchmarks.calls.op_overhead [SHAPE …] [--json FILE] [--pieces] [--variants] [--no-compile]

One process, all calls in turns, so that all meet the same clocks. CPU time: from the first to the last of a burst of
calls that the GPU is given without waiting, the median over the bursts, a call. Device time: a graph of many calls,
replayed. `--pieces` also times the parts of an eager call, each alone; `--variants` calls with what SDPA lacks, each in
turns with the plain one."""

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import evoattn
from evoattn.correctness.reference import make_inputs
from evoattn.model.problem import AttentionProblem
from evoattn.model.shape_text import by_name_or_shape
from evoattn.ops import custom_op  # noqa: F401 - the latter defines the op that compiled code calls
from evoattn.ops.arguments import mask_of
from evoattn.ops.choice import Choice
from evoattn.ops.given import call_of
from evoattn.ops.plan import CallPlan
from evoattn.ops.runtime import current

SHAPES = [
    "B=1,H=8,S=128,D=64,dtype=fp16,mask=full",
    "B=1,H=16,S=1024,D=64,dtype=fp16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,S=1024,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,Sq=1,Sk=2048,D=128,dtype=bf16,mask=full",
]
BURST, BURSTS, IN_GRAPH = 40, 60, 20
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Call = Callable[[], object]


@dataclass(frozen=True)
class Timed:
    """A call, and the only backend that SDPA may take meanwhile: chosen outside of the timed bursts."""

    call: Call
    backend: SDPBackend | None = None

    def pinned(self) -> contextlib.AbstractContextManager[object]:
        return sdpa_kernel(self.backend) if self.backend is not None else contextlib.nullcontext()


def host_us(calls: dict[str, Timed]) -> dict[str, float]:
    """Median CPU time of each call in µs, bursts in turns."""
    bursts: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(BURSTS):
        for name, timed in calls.items():
            with timed.pinned():
                timed.call()
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(BURST):
                    timed.call()
                bursts[name].append((time.perf_counter() - started) / BURST * 1e6)
    return {name: statistics.median(times) for name, times in bursts.items()}


def pieces_us(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grouped: bool) -> dict[str, float]:
    """Median CPU time in µs of the parts of an eager call. The launches are those of the kernel that serves it."""
    keywords = {"is_causal": causal, "enable_gqa": grouped}
    runtime, out, other = current.runtime(), torch.empty_like(q), torch.empty_like(q)
    made, given = call_of(q, k, v, keywords), call_of(q, k, v, {**keywords, "out": out})
    choice = runtime.choice(made)
    assert isinstance(choice, Choice)
    plan = runtime.prepare(choice, q.get_device())
    assert isinstance(plan, CallPlan)
    plan.run(made, (q, k, v, out), None)
    platform, (launch, *_) = runtime.platform, plan.launches
    assert platform is not None
    index, turn = q.get_device(), itertools.cycle((out, other))
    calls: dict[str, Call] = {
        "shapes, strides": lambda: (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        "dtypes, devices": lambda: (q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device()),
        "empty_like": lambda: torch.empty_like(q),
        "addresses": lambda: (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
        "stream": lambda: platform.stream(index),
        "current device": platform.current_device,
        "one launch": lambda: platform.launch(launch.config, launch.function, launch.arguments, None),
        "launches of one call": lambda: plan.run(made, (q, k, v, out), None),
        "launches, another output": lambda: plan.run(made, (q, k, v, next(turn)), None),
        "attend, out given": lambda: runtime.attend(given),
        "attend": lambda: runtime.attend(made),
    }
    return host_us({name: Timed(call) for name, call in calls.items()})


def variants_us(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grouped: bool) -> dict[str, float]:
    """Median CPU time in µs of calls with one argument that SDPA lacks, and of a plain one."""
    heads = q.shape[1]
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "window": {"window": (min(127, k.shape[2] - 1), -1)},
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": q.new_zeros(heads)},
        "slopes": {"alibi_slopes": torch.ones(heads, device=q.device)},
        "bias": {"bias": q.new_zeros(1, heads, q.shape[2], k.shape[2])},
        "keys in use": {"seqused_k": torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)},
    }
    keywords: dict[str, Any] = {"is_causal": causal, "enable_gqa": grouped}
    call = partial(evoattn.attention, q, k, v, **keywords)
    explained = {name: evoattn.explain(q, k, v, **keywords, **more) for name, more in given.items()}
    served = {name: more for name, more in given.items() if not explained[name].startswith("SDPA")}
    return host_us({name: Timed(partial(call, **more)) for name, more in served.items()})


def device_us(timed: Timed) -> float:
    """Device time of a call in µs, out of a graph of many."""
    stream = torch.cuda.Stream()
    with timed.pinned(), torch.cuda.stream(stream):
        timed.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with timed.pinned(), torch.cuda.graph(graph):
        for _ in range(IN_GRAPH):
            timed.call()
    times: list[float] = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / IN_GRAPH * 1e3)
    return statistics.median(times[5:])


def refuses(timed: Timed) -> bool:
    try:
        with timed.pinned():
            timed.call()
    except RuntimeError:
        return True
    return False


def measure(problem: AttentionProblem, compiled: bool, pieces: bool, variants: bool) -> dict[str, object]:
    """All times of one problem."""
    tensors = make_inputs(problem, 1, "cuda")
    q, k, v = (tensors[name] for name in "qkv")
    causal, grouped = problem.mask != "full", problem.kv_heads != problem.heads

    def ours() -> object:
        return evoattn.attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    def torchs() -> object:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    candidates = {f"sdpa {name}": Timed(torchs, backend) for name, backend in BACKENDS.items()}
    backends = {name: timed for name, timed in candidates.items() if not refuses(timed)}
    calls = {"evoattn": Timed(ours), "sdpa": Timed(torchs), **backends}
    calls["evoattn op"] = Timed(lambda: through_op(q, k, v, causal))
    if compiled:
        calls["evoattn compiled"] = Timed(torch.compile(ours))
        calls["sdpa compiled"] = Timed(torch.compile(torchs))
    row: dict[str, object] = {
        "problem": problem.describe(),
        "runs": evoattn.explain(q, k, v, is_causal=causal, enable_gqa=grouped),
        "host_us": host_us(calls),
        "graph_us": {name: device_us(timed) for name, timed in {"evoattn": Timed(ours), **backends}.items()},
    }
    if pieces:
        row["pieces_us"] = pieces_us(q, k, v, causal, grouped)
    if variants:
        row["variants_us"] = variants_us(q, k, v, causal, grouped)
    return row


def through_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> object:
    """The custom op that compiled code calls."""
    return torch.ops.evoattn.attention(q, k, v, mask_of(None, causal), k.shape[1] != q.shape[1], None, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--estimated", action="store_true", help="also run kernels that were measured on no GPU like this"
    )
    parser.add_argument("--pieces", action="store_true", help="also time the parts of an eager call")
    parser.add_argument("--variants", action="store_true", help="also time calls with what SDPA lacks")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    current.runtime().estimated = arguments.estimated
    rows = []
    with torch.no_grad():
        for shape in arguments.shapes:
            row = measure(by_name_or_shape(shape), not arguments.no_compile, arguments.pieces, arguments.variants)
            rows.append(row)
            print(f"\n{row['problem']}\n  {row['runs']}")
            for what in ("host_us", "graph_us", "pieces_us", "variants_us"):
                times = row.get(what, {})
                assert isinstance(times, dict)
                print(f"  {what:11}" + "  ".join(f"{name} {value:.1f}" for name, value in times.items()))
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
