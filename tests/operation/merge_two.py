"""An operation that evoattn does not have: the merge of two partial attention answers by their log-sum-exps, with an
output of 8 bits that says which of them is the larger one.

This module is its row of the table, its proof (`correctness.cases.Proof`) and a family that computes it: all that a new
operation takes beside a template."""

import math
from pathlib import Path

import torch

from evoattn.correctness.interpreter_cases import SmallCase
from evoattn.correctness.reference import LSE_ABSOLUTE, LSE_RELATIVE, Exact
from evoattn.families.base import Family
from evoattn.families.genes import Genes, gene
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.operation import OPERATIONS, Operation, contiguous


def inputs(problem):
    o, lse, _ = outputs(problem)
    return tuple(tensor._replace(name=f"{tensor.name}{part}") for part in (1, 2) for tensor in (o, lse))


def outputs(problem):
    rows = problem.batch, problem.heads, problem.seqlen_q
    floats = contiguous("o", (*rows, problem.head_dim), "float32"), contiguous("lse", rows, "float32")
    return *floats, contiguous("second", rows, "int8")


def rows_of(problem):
    return problem.batch * problem.heads * problem.seqlen_q


MERGE = Operation(
    "merge_two",
    inputs,
    outputs,
    flops=lambda p: 3 * rows_of(p) * p.head_dim,
    bytes=lambda p: rows_of(p) * (12 * (p.head_dim + 1) + 1),
    proof=__name__,
)
OPERATIONS[MERGE.name] = MERGE


def make_inputs(problem, seed, device, kind="plain", tile=64):
    """Normal answers; log-sum-exps far apart, and with `no_keys` -inf in one part, in the other, or in both."""
    generator = torch.Generator(device=device).manual_seed(seed)
    made = {s.name: torch.randn(s.shape, generator=generator, device=device) for s in problem.inputs}
    for number, name in enumerate(("lse1", "lse2")):
        made[name] *= 3
        if kind == "no_keys":
            turn = torch.arange(made[name].numel(), device=device).view(made[name].shape) % 4
            made[name][(turn == number) | (turn == 2)] = -math.inf
    return made


def make_answer(problem, tensors, kind="plain", double=False):
    """float64: the parts weighted by exp(lse). `__expf` of a difference and the sums are 2^-20 off at most."""
    lse1, lse2 = tensors["lse1"].double(), tensors["lse2"].double()
    lse = torch.logaddexp(lse1, lse2)
    parts = ((tensors["o1"], lse1), (tensors["o2"], lse2))
    o = sum((part - lse).exp().nan_to_num(0)[..., None] * values.double() for values, part in parts)
    largest = o.abs().max().item()
    finite = lse.masked_fill(lse.isinf(), 0).abs().max().item()
    return {
        "o": Exact(o, 1e-5 * largest, 1e-6 * largest),
        "lse": Exact(lse, LSE_ABSOLUTE + LSE_RELATIVE * finite, logarithms=True),
        "second": Exact((lse2 > lse1).double(), 0.0, 0.0),
    }


def device_cases(problem):
    ragged = problem.with_(batch=2, heads=3, kv_heads=3, seqlen_q=131)
    return [("ragged", ragged, "plain"), ("parts without keys", ragged, "no_keys")]


def interpreter_cases(problem, config):
    return [SmallCase(*case) for case in device_cases(problem)]


class MergeGenes(Genes):
    BLOCK_M: int = gene("rows per block, a thread each", (32, 64, 128, 256))


class MergeTwo(Family):
    name = "merge_two"
    summary = "a thread for each row"
    devices = "any GPU"
    genes = MergeGenes
    operations = ("merge_two",)
    templates = Path(__file__).parent / "templates"
    dtypes = ("fp32",)
    masks = ("full",)

    def refuse(self, problem, gpu):
        return None

    def why_not(self, problem, config, gpu, redundant=True):
        return None

    def constants(self, problem, config, gpu):
        return {"HEAD_DIM": problem.head_dim}

    def launches(self, problem, config, gpu):
        rows, threads = rows_of(problem), config.params["BLOCK_M"]
        buffers = tuple(Buffer(tensor.name) for tensor in (*problem.inputs, *problem.outputs))
        grid = -(-rows // threads), 1, 1
        return (KernelLaunch("merge_two", grid, (threads, 1, 1), 0, (*buffers, Scalar("int32", rows))),)

    def work(self, problem, config, registers=0):
        return ()
