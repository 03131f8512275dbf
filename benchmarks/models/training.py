"""Training through evoattn beside "sdpa": losses over each other, step time, peak memory.

    python -m benchmarks.models.training [--model llama vit] [--steps 200] [--estimated] [--compile] [--json FILE]

A Llama of four layers on texts of 2,048 tokens and a ViT on images of 197 patches, random weights, the same batches in
the same order, AdamW under autocast to bfloat16. Each model is trained from the same weights once for each attention,
and once more with PyTorch's efficient kernels in place of its default ones: what those losses differ by is what
rounding alone makes of these models. Times are of the second half of the steps, by CUDA events; memory is the most that
torch's allocator had in use. `--estimated` allows kernels that were measured on no such card. On a CPU, where kernels
do not run, it goes through with few small steps: the losses are equal then."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

import evoattn
from evoattn.integrations.transformers import NAME, register

OTHER = "sdpa, efficient"
"""PyTorch's attention by other kernels than its default."""
EFFICIENT = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # the second on a CPU
ATTENTIONS = ("sdpa", OTHER, NAME)
BATCHES = 16
"""Different ones, in turns, so that there is something to learn."""
SHOWN = (1, 2, 5, 10, 20, 50, 100, 150, 200)
"""Steps whose losses are printed."""
LEARNING_RATE = 3e-4
LIBRARY: Any = transformers
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """One training: losses of all steps, median time of a step, most memory, and what ran attention."""

    model: str
    attention: str
    losses: list[float]
    step_ms: float
    peak_mib: float
    ran: str


def llama(small: bool, device: str) -> tuple[Callable[[str], Any], Callable[[torch.Generator], Batch]]:
    sizes: dict[str, Any] = dict(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=4
    )
    batch, length, words = 4, 2048, 32000
    if small:
        sizes |= dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2)
        batch, length, words = 2, 32, 50

    def model(attention: str) -> Any:
        config = LIBRARY.LlamaConfig(
            **sizes, num_hidden_layers=4, vocab_size=words, use_cache=False, attn_implementation=attention
        )
        return LIBRARY.LlamaForCausalLM(config)

    def data(generator: torch.Generator) -> Batch:
        tokens = torch.randint(words, (batch, length), generator=generator).to(device)
        return {"input_ids": tokens, "labels": tokens}

    return model, data


def vit(small: bool, device: str) -> tuple[Callable[[str], Any], Callable[[torch.Generator], Batch]]:
    sizes: dict[str, Any] = dict(hidden_size=768, intermediate_size=3072, num_attention_heads=12, num_hidden_layers=12)
    batch, side, labels = 64, 224, 100
    if small:
        sizes |= dict(hidden_size=64, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2)
        batch, side, labels = 4, 64, 5

    def model(attention: str) -> Any:
        config = LIBRARY.ViTConfig(
            **sizes, image_size=side, patch_size=16, num_labels=labels, attn_implementation=attention
        )
        return LIBRARY.ViTForImageClassification(config)

    def data(generator: torch.Generator) -> Batch:
        pixels = torch.randn(batch, 3, side, side, generator=generator).to(device)
        return {"pixel_values": pixels, "labels": torch.randint(labels, (batch,), generator=generator).to(device)}

    return model, data


MODELS = {"llama": llama, "vit": vit}


def steps_of(device: str, count: int, step: Callable[[int], float]) -> Iterator[tuple[float, float]]:
    """(loss, milliseconds) of each step."""
    for number in range(count):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            loss = step(number)
            end.record()
            end.synchronize()
            yield loss, begin.elapsed_time(end)
        else:
            started = time.perf_counter()
            loss = step(number)
            yield loss, 1e3 * (time.perf_counter() - started)


def ran(shapes: evoattn.Shapes) -> str:
    """What attention was asked for in a step, and which kernels `evoattn.warmup` says for it."""
    lines = [problem.describe() for problem in shapes]
    if torch.cuda.is_available():
        lines = [f"{line}: {said}" for line, said in zip(lines, evoattn.warmup(list(shapes)), strict=True)]
    return "\n".join(lines)


def train(name: str, attention: str, count: int, compiled: bool) -> Run:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    make, data = MODELS[name](device == "cpu", device)
    torch.manual_seed(0)
    model = make(attention.split(",")[0]).to(device).train()
    generator = torch.Generator().manual_seed(1)
    batches = [data(generator) for _ in range(BATCHES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def forward(batch: Batch) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(**batch).loss
        return loss

    run_forward = torch.compile(forward) if compiled else forward

    def step(number: int) -> float:
        loss = run_forward(batches[number % BATCHES])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    with evoattn.capture() as shapes:  # of a step that changes nothing
        forward(batches[0]).backward()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = list(steps_of(device, count, step))
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0
    times = [ms for _, ms in found[count // 2 :]]
    said = ran(shapes) if attention == NAME else ""
    return Run(name, attention, [loss for loss, _ in found], statistics.median(times), peak, said)


def table(runs: list[Run]) -> str:
    """Losses side by side, then times and memory."""
    lines = []
    for name in dict.fromkeys(run.model for run in runs):
        each = [next(run for run in runs if (run.model, run.attention) == (name, a)) for a in ATTENTIONS]
        theirs, ours = each[0], each[-1]
        lines += [f"{name}: losses", f"| step | {' | '.join(ATTENTIONS)} |", "|---|---|---|---|"]
        for step in sorted({*(s for s in SHOWN if s <= len(ours.losses)), len(ours.losses)}):
            lines.append(f"| {step} | {' | '.join(f'{run.losses[step - 1]:.4f}' for run in each)} |")
        lines += ["", "| attention | largest difference to sdpa | step, ms | peak memory, MiB |", "|---|---|---|---|"]
        for run in each:
            most = max(abs(a - b) for a, b in zip(theirs.losses, run.losses, strict=True))
            lines.append(f"| {run.attention} | {most:.4f} | {run.step_ms:.2f} | {run.peak_mib:.0f} |")
        lines += [f"step time: {theirs.step_ms / ours.step_ms:.3f} times sdpa's speed", "", ours.ran, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--estimated", action="store_true", help="allow kernels that were measured on no such card")
    parser.add_argument("--compile", action="store_true", help="compile the forward and the backward pass")
    parser.add_argument("--json", type=Path, help="where all losses, times and memory go")
    given = parser.parse_args()
    register()
    runs = []
    for name in given.model:
        for attention in ATTENTIONS:
            if attention == NAME and given.estimated:
                evoattn.enable(estimated=True)
            with sdpa_kernel(EFFICIENT) if attention == OTHER else nullcontext():
                runs.append(train(name, attention, given.steps, given.compile))
            print(f"{name} {attention}: {runs[-1].step_ms:.2f} ms a step", file=sys.stderr, flush=True)
            evoattn.disable()  # "sdpa" is PyTorch's
    print(table(runs))
    if given.json:
        given.json.write_text(json.dumps([asdict(run) for run in runs], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
