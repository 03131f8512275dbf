"""What do 8 bits cost a trained model? Trains a small one on the CPU, then runs it with attention of 16 and of 8 bits.

The task: pairs of a key and a value, of which a key's favourite comes up seven times of ten. The model sees a key and
says which value will come, so that it has to weigh the pairs of that key which it has seen. Its loss ends well above
zero, and shows what attention loses. `python -m benchmarks.models.eight_bits` prints the table of
reports/eight_bits.md.

Outlier channels, as Llama's keys have, are a constant that is added to a channel of all keys: all scores of a query
change alike, so that attention is the same, and only what is lost by rounding is not."""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import evoattn
from evoattn.correctness.reference import exact_attention
from evoattn.model.problem import AttentionProblem
from evoattn.ops.attention_fp8 import quantised
from evoattn.ops.beside import Granularity, Wanted, quantize

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
KEYS, VALUES, PAIRS, FAVOUR = 32, 32, 256, 0.7
HEADS, KV_HEADS, DIM, WIDTH, LAYERS = 4, 2, 64, 128, 2
OUTLIER, CHANNEL = 20.0, 5
CACHES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sixteen_bits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_torch(*(one.bfloat16() for one in (q, k, v)))


def cached(dtype: torch.dtype, granularity: Granularity) -> Attention:
    """16-bit queries over keys and values of 8 bits."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k8, v8, k_scale, v_scale = evoattn.quantize_kv(k, v, dtype, granularity)
        return evoattn.attention(
            q.bfloat16(), k8, v8, k_scale=k_scale, v_scale=v_scale, enable_gqa=True, is_causal=True
        )

    return attend


def fp8(smooth: bool) -> Attention:
    """Queries, keys, values and weights in e4m3: `attention_fp8` by the exact reference of its numbers."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given, _ = quantised(q, k, v, smooth)
        group = q.shape[1] // k.shape[1]
        q, k, v = (
            numbers.float() * (scale.repeat_interleave(times, 1)[:, :, None, None] if scale is not None else 1.0)
            for numbers, scale, times in (
                (given.query, given.q_scale, group),
                (given.key, given.k_scale, 1),
                (given.value, given.v_scale, 1),
            )
        )
        (batch, heads, rows, dim), kv_heads = q.shape, k.shape[1]
        problem = AttentionProblem(batch, heads, kv_heads, rows, rows, dim, "fp32", "causal_upper_left")
        return exact_attention(problem, q, k, v, torch.float8_e4m3fn).bfloat16()

    return attend


def by_kernel(smooth: bool) -> Attention:
    """`attention_fp8` as it runs on a GPU."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        there = [one.bfloat16().cuda() for one in (q, k, v)]
        answer = evoattn.attention_fp8(*there, causal="upper_left", smooth_k=smooth, strict=True)
        assert isinstance(answer, Tensor)
        return answer.cpu()

    return attend


def int8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries, keys and values in int8, a scale of each K/V head; weights in 16 bits."""
    made = [quantize(one, Wanted(torch.int8, "head", k.shape[1])) for one in (q, k, v)]
    numbers, (of_q, of_k, of_v) = [one.numbers for one in made], [one.scale for one in made]
    answer = evoattn.attention_fp8(*numbers, causal="upper_left", q_descale=of_q, k_descale=of_k, v_descale=of_v)
    assert isinstance(answer, Tensor)
    return answer


def kinds() -> Iterator[tuple[str, Attention]]:
    yield "bf16", sixteen_bits
    for name, dtype in CACHES.items():
        for granularity in ("tensor", "head", "token"):
            yield f"cache of {name}, a scale of each {granularity}", cached(dtype, granularity)
    yield "fp8", fp8(False)
    yield "fp8, `smooth_k`", fp8(True)
    yield "int8 queries too", int8
    if torch.cuda.is_available():
        yield "fp8 by a kernel", by_kernel(False)
        yield "fp8 by a kernel, `smooth_k`", by_kernel(True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, HEADS * DIM), nn.Linear(WIDTH, 2 * KV_HEADS * DIM)
        self.o = nn.Linear(HEADS * DIM, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, attend: Attention, outlier: float) -> Tensor:
        batch, rows, _ = x.shape
        normed = self.norm(x)
        q = self.q(normed).view(batch, rows, HEADS, DIM).transpose(1, 2)
        k, v = self.kv(normed).view(batch, rows, 2, KV_HEADS, DIM).permute(2, 0, 3, 1, 4)
        if outlier:
            k = k.clone()
            k[..., CHANNEL] += outlier
        x = x + self.o(attend(q, k, v).to(x.dtype).transpose(1, 2).flatten(2))
        grown: Tensor = x + self.mlp(x)
        return grown


class Model(nn.Module):
    """What it is shown of a place: its key, and the pair before it."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.past, self.value = (nn.Embedding(n, WIDTH) for n in (KEYS, KEYS + 1, VALUES + 1))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VALUES))

    def loss(self, keys: Tensor, values: Tensor, attend: Attention = by_torch, outlier: float = 0.0) -> Tensor:
        """In nats for each value."""
        before = [F.pad(one[:, :-1] + 1, (1, 0)) for one in (keys, values)]
        x = self.key(keys) + self.past(before[0]) + self.value(before[1])
        for layer in self.layers:
            x = layer(x, attend, outlier)
        return F.cross_entropy(self.head(x).flatten(0, 1), values.flatten())


def batch(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    keys = torch.randint(KEYS, (count, PAIRS), generator=generator)
    favourites = torch.randint(VALUES, (count, KEYS), generator=generator)
    others = torch.randint(VALUES, (count, PAIRS), generator=generator)
    favoured = torch.rand(count, PAIRS, generator=generator) < FAVOUR
    return keys, torch.where(favoured, favourites.gather(1, keys), others)


def trained(steps: int, seed: int = 0, count: int = 8) -> Model:
    torch.manual_seed(seed)
    model, generator = Model(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        model.loss(*batch(count, generator)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model


def error(attend: Attention, outlier: float, keys: int = 1024) -> float:
    """Root mean square of the error over that of the answer, of normal values."""
    generator, counts = torch.Generator().manual_seed(1), (HEADS, KV_HEADS, KV_HEADS)
    q, k, v = (torch.randn(2, heads, keys, DIM, generator=generator).bfloat16() for heads in counts)
    k[..., CHANNEL] += outlier
    exact = by_torch(q.double(), k.double(), v.double())
    return ((attend(q, k, v).double() - exact).square().mean() / exact.square().mean()).sqrt().item()


@torch.no_grad()
def rows(model: Model, count: int = 16) -> Iterator[tuple[str, float, float, float, float]]:
    """(kind, errors of normal values and with an outlier channel, losses of the model and with one)."""
    shown = batch(count, torch.Generator().manual_seed(99))
    for name, attend in kinds():
        plain, with_outlier = (error(attend, outlier) for outlier in (0.0, OUTLIER))
        loss, loss_with_outlier = (model.loss(*shown, attend, outlier).item() for outlier in (0.0, OUTLIER))
        yield name, plain, with_outlier, loss, loss_with_outlier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="of training, some 40 s on one core")
    model = trained(parser.parse_args().steps)
    print("| attention | error | with an outlier channel | loss | with an outlier channel |\n|---|---|---|---|---|")
    for name, plain, outlier, loss, loss_outlier in rows(model):
        print(f"| {name} | {plain:.2%} | {outlier:.2%} | {loss:.4f} | {loss_outlier:.4f} |")


if __name__ == "__main__":
    main()
