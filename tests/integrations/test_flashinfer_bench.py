"""Solutions for Definitions of FlashInfer-Bench: run as text, and by its own builder where it is there."""

import json
import math
import runpy
import sys

import pytest
import torch

from evoattn.integrations import flashinfer_bench as bench
from tests.integrations.flash_attn_formula import Asked
from tests.integrations.serving_batch import DECODING, HEADS, MIXED, Batch, near

SCALE, LATENT, ROPE = 0.2, 64, 16


def definition(name, inputs, outputs=("output", "lse"), **axes):
    """JSON as FlashInfer-Bench has it, with an axis of its own for each dimension."""
    shaped = {
        one: {"shape": None, "dtype": "float32"}
        if one == "sm_scale"
        else {"shape": [f"{one}{i}" for i in range(value.dim())], "dtype": str(value.dtype).removeprefix("torch.")}
        for one, value in inputs.items()
    }
    axes = {axis: {"type": "var"} for spec in shaped.values() for axis in spec["shape"] or ()}
    return {
        "name": name,
        "op_type": name.rsplit("_", 1)[0],
        "axes": axes,
        "inputs": shaped,
        "outputs": {one: {"shape": [next(iter(axes))], "dtype": "float32"} for one in outputs},
        "reference": f"def run({', '.join(inputs)}):\n    return None\n",
    }


def lists(batch):
    """The batch's pages as FlashInfer lists them."""
    counts = [-(-length // batch.page) for length in batch.lengths]
    indices = torch.cat([row[:count] for row, count in zip(batch.table, counts)])
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)]).int()
    last = [length - (count - 1) * batch.page for length, count in zip(batch.lengths, counts)]
    return {"kv_indptr": starts, "kv_indices": indices}, torch.tensor(last).int()


def paged(batch):
    where, last = lists(batch)
    inputs = {"q": batch.q, "k_cache": batch.k, "v_cache": batch.v, **where, "sm_scale": SCALE}
    if batch.page > 1:
        inputs["kv_last_page_len"] = last
    if batch.queries == DECODING:
        return "gqa_paged_decode_h4_kv2_d64", inputs
    return "gqa_paged_prefill_causal_h4_kv2_d64", inputs | {"qo_indptr": batch.bounds}


def ragged(batch):
    k, v = (torch.cat(some) for some in zip(*(batch.keys(i) for i in range(len(batch.queries)))))
    starts = torch.tensor([0, *torch.tensor(batch.lengths).cumsum(0)]).int()
    inputs = {"q": batch.q, "k": k, "v": v, "qo_indptr": batch.bounds, "kv_indptr": starts, "sm_scale": SCALE}
    return "gqa_ragged_prefill_causal_h4_kv2_d64", inputs


def ran(solution, inputs):
    scope = {}
    exec(solution["sources"][0]["content"], scope)
    return scope["run"](**inputs)


CASES = [(paged, DECODING, 1), (paged, DECODING, 16), (paged, MIXED, 1), (paged, MIXED, 16), (ragged, MIXED, 16)]


@pytest.mark.parametrize("make, queries, page", CASES)
def test_what_a_solution_answers(make, queries, page):
    batch = Batch(queries, page)
    name, inputs = make(batch)
    output, lse = ran(bench.solution_of(definition(name, inputs)), inputs)
    expected, natural = batch.expected(Asked(SCALE, True))
    assert near(output, expected)
    assert lse.shape == (len(batch.q), HEADS) and lse.dtype == torch.float32
    assert near(lse, natural.T / math.log(2))


@pytest.mark.parametrize("queries", [DECODING, MIXED])
def test_latent_caches(queries):
    batch = Batch(queries)
    latent, rotated = (batch.rows(len(batch.k), batch.page, width, seed=width) for width in (LATENT, ROPE))
    q, q_pe = (batch.rows(len(batch.q), HEADS, width, seed=width + 1) for width in (LATENT, ROPE))
    where, last = lists(batch)
    inputs = {"q_nope": q, "q_pe": q_pe, "ckv_cache": latent, "kpe_cache": rotated, **where}
    inputs |= {"sm_scale": SCALE, "kv_last_page_len": last}
    name = "mla_paged_decode_h4"
    if queries == MIXED:
        name, inputs = "mla_paged_prefill_causal_h4", inputs | {"qo_indptr": batch.bounds}
    output = ran(bench.solution_of(definition(name, inputs, outputs=["output"])), inputs)
    batch.q = torch.cat((q, q_pe), dim=-1)
    batch.k, batch.v = torch.cat((latent, rotated), dim=-1)[:, :, None], latent[:, :, None]
    assert near(output, batch.expected(Asked(SCALE, True))[0])


def test_sequences_without_pages():
    batch = Batch(DECODING)
    empty = dict(kv_indptr=torch.zeros(5).int(), kv_indices=torch.zeros(0).int())
    output, lse = bench.gqa_paged(batch.q, batch.k, batch.v, SCALE, **empty)
    bounds = torch.tensor([0, 3, 4, 9, 9]).int()
    assert bench.pages_of(batch.k, batch.v, **empty, qo_indptr=bounds)[1].longest == 5
    assert not output.any() and bool(torch.isneginf(lse).all())


def test_what_is_left_out_is_said():
    name, inputs = paged(Batch(DECODING))
    assert "no function" in bench.solution_of(definition("gemm", {"a": torch.ones(1)}))
    assert "mask" in bench.solution_of(definition(name, inputs | {"mask": torch.ones(1)}))
    assert "outputs" in bench.solution_of(definition(name, inputs, outputs=["lse", "output"]))


def test_a_folder_of_definitions(tmp_path, capsys, monkeypatch):
    name, inputs = paged(Batch(DECODING))
    folder = tmp_path / "definitions" / "gqa_paged"
    folder.mkdir(parents=True)
    (folder / f"{name}.json").write_text(json.dumps(definition(name, inputs)))
    (folder / "gemm.json").write_text(json.dumps(definition("gemm", {"a": torch.ones(1)})))
    (folder / "other.json").write_text("[]")
    assert bench.main([str(tmp_path / "definitions"), str(tmp_path / "solutions")]) == 0
    assert json.loads((tmp_path / "solutions" / f"evoattn_{name}.json").read_text())["definition"] == name
    said = capsys.readouterr().out
    assert "1 solutions" in said and "gemm: no function" in said and "other.json: no Definition" in said
    monkeypatch.setattr(sys, "argv", ["a program"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(bench.__file__, run_name="__main__")


def test_the_engine_takes_them():
    data = pytest.importorskip("flashinfer_bench.data")
    builders = pytest.importorskip("flashinfer_bench.compile.builders.python_builder")
    for make, queries, page in CASES:
        batch = Batch(queries, page)
        name, inputs = make(batch)
        asked = definition(name, inputs)
        solution = data.Solution(**bench.solution_of(asked))
        runnable = builders.PythonBuilder().build(data.Definition(**asked), solution)
        output, _ = runnable(*inputs.values())
        assert near(output, batch.expected(Asked(SCALE, True))[0])
