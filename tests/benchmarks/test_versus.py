"""The comparison with Kernel Tuner and Helion, as far as it needs neither of them and no GPU."""

import ast
import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.versus import by_evoattn, by_helion, by_kernel_tuner, found, rates
from benchmarks.versus.final import chosen
from benchmarks.versus.found import Found, Tried
from benchmarks.versus.kernel_tuner_space import THREADS, params_of, restrictions, tune_params
from evoattn.families import registry
from evoattn.families.flash_mma.family import FlashMma
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.paths import ROOT
from evoattn.model.records import Timing, Trial, TrialState
from evoattn.model.space import KernelConfig
from evoattn.search.starting import starting_configs

H100 = GPUS["h100"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seed_h100", "fa_d128_4k_causal", "seed_s512"])
def test_restrictions_allow_what_the_family_takes_and_nothing_else(name):
    problem, family, rng = lookup(name), FlashMma(), random.Random(0)
    values = {p.name: p.values for p in load_space(family.name, H100).parameters}
    offered = tune_params(problem, H100)
    rules = [compile(rule, rule, "eval") for rule in restrictions(problem, H100)]
    allowed = 0

    def draw():
        params = {name: rng.choice(choices) for name, choices in values.items()}
        if rng.random() < 0.7:  # near what can be
            params["BLOCK_M"] = rng.choice([m for m in values["BLOCK_M"] if m % (16 * params["WARPS"]) == 0] or [16])
            params["KEY_SPLIT"] = rng.choice((1, params["KEY_SPLIT"]))
        return params

    for _ in range(4000):
        params = draw()
        threads = {THREADS: 32 * params["WARPS"] * params["KEY_WARPS"]}
        theirs = all(params[n] in offered[n] for n in values) and all(
            eval(rule, {}, params | threads) for rule in rules
        )
        ours = family.why_invalid(problem, KernelConfig(family.name, params), H100)
        assert theirs == (ours is None), (params, ours)
        allowed += theirs
    assert allowed > 20


def test_kernel_tuner_gets_our_source_grid_and_arguments():
    problem, family = lookup("seed_h100"), registry.lookup("flash_mma")
    bench = by_kernel_tuner.Bench(problem, H100, params_of)
    config = starting_configs(load_space("flash_mma", H100), problem, H100)[0]
    params = config.params | {THREADS: 128}
    assert bench.config(params).id == config.id
    assert "constexpr int BLOCK_M" in bench.source(params)
    (launch,) = family.launches(problem, config, H100)
    assert bench.launch(params) == launch
    given = bench.arguments(params, dict(q="Q", k="K", v="V", o="O"))
    assert given[:4] == ["Q", "K", "V", "O"] and len(given) == len(launch.args)
    assert [type(value).__name__ for value in given[4:8]] == ["int32"] * 4


def test_kernel_tuner_gets_uuids_of_16_bytes():
    runtime = SimpleNamespace(getDeviceProperties=lambda device: {"uuid": b"\x01" * device, "name": b"GPU"})
    by_kernel_tuner.with_whole_uuids(runtime)
    assert runtime.getDeviceProperties(16) == {"uuid": b"\x01" * 16, "name": b"GPU"}
    assert runtime.getDeviceProperties(3)["uuid"] == b"\x01\x01\x01" + b"\0" * 13


def test_kernel_tuners_results_are_times_in_us_or_failures():
    bench = by_kernel_tuner.Bench(lookup("seed_h100"), H100, params_of)
    params = starting_configs(load_space("flash_mma", H100), bench.problem, H100)[0].params
    stamp = {"timestamp": "2026-11-22 06:00:00.500000+00:00", THREADS: 128}
    timed = by_kernel_tuner.tried(bench, params | stamp | {"time": 0.02})
    assert timed.us == pytest.approx(20.0) and timed.config == {"family": "flash_mma", "params": params}
    assert by_kernel_tuner.tried(bench, params | stamp | {"time": RuntimeError()}).us is None


def test_kernel_tuner_gets_configs_of_the_whole_search():
    configs = [{"n": n} for n in range(10)]
    assert [c["n"] for c in by_kernel_tuner.spread(configs, 4)] == [0, 2, 5, 7]
    assert by_kernel_tuner.spread(configs, 40) == configs and by_kernel_tuner.spread([], 4) == []


def test_helions_trace_is_read():
    events = [
        {"event": "run_start", "timestamp_s": 100.0},
        {"event": "trial_start", "timestamp_s": 101.0, "status": "started", "perf_ms": None, "config": {"a": 1}},
        {"event": "trial", "timestamp_s": 102.0, "status": "ok", "perf_ms": 0.5, "config": {"a": 1}},
        {"event": "trial", "timestamp_s": 103.5, "status": "error", "perf_ms": None, "config": {"a": 2}},
    ]
    assert by_helion.tried(map(json.dumps, events), 99.0) == [Tried(3.0, 500.0, {"a": 1}), Tried(4.5, None, {"a": 2})]


def test_evoattns_trials_count_with_the_time_from_before_the_final():
    timings = tuple(Timing((us,), {"stage": stage}) for stage, us in (("screen", 9.0), ("repeat", 8.0), ("final", 7.0)))
    fields = dict(reason="", source_hash=None, compile_info=None, validation=None, relative_cost=None, parents=())
    made = dict(operator="", created_at="1970-01-01T00:01:40.000+00:00", seconds=0.1)
    trial = Trial(1, 1, "f", {"A": 1}, "id", TrialState.COMPLETE, timings=timings, **fields, **made)
    config = {"family": "f", "params": {"A": 1}}
    assert by_evoattn.tried(trial, 90.0) == Tried(10.0, 8.0, config)
    pruned = replace(trial, state=TrialState.PRUNED)
    assert by_evoattn.tried(pruned, 90.0).us == 8.0, "right, and timed"
    wrong = Trial(2, 1, "f", {"A": 1}, "id", TrialState.WRONG_RESULT, timings=timings, **fields, **made)
    assert by_evoattn.tried(wrong, 90.0).us is None


def test_words_of_a_search_are_not_read_as_options():
    assert by_evoattn.split(["p", "-o", "f", "--", "--budget", "9s"]) == (["p", "-o", "f"], ["--budget", "9s"])
    assert by_evoattn.split(["p"]) == (["p"], [])


def run_of(*tried, tool="a tool 1.0", kind="evoattn"):
    return Found(tool, kind, "seed_h100", [Tried(at, us, {"n": n}) for n, (at, us) in enumerate(tried)])


def test_the_best_of_each_budget_takes_part_once(tmp_path):
    run = run_of((5.0, 30.0), (14.0, None), (20.0, 10.0), (50.0, 12.0))
    run.write(tmp_path / "found.json")
    again = found.read(tmp_path / "found.json")
    assert again == run and again.best_within(15.0).us == 30.0 and again.best_within(1.0) is None
    assert again.per_second == pytest.approx(3 / 45)
    assert list(chosen([again], [15.0, 30.0, 60.0])) == ["a tool 1.0 after 15 s", "a tool 1.0 after 30 s, 60 s"]
    assert list(chosen([again], [50.0, 60.0])) == ["a tool 1.0 after 50 s"]  # it ended by then
    assert "4 candidates (1 failed), the first after 5.0 s, the last after 50.0 s" in rates.row(again)
    assert "0.07 once running, 0.08 from its start" in rates.row(again)
    assert "nothing was tried" in rates.row(run_of())


def test_helions_kernels_differ_by_the_mask_alone():
    """It cannot be imported here without Helion; its two kernels have one body but for the mask."""
    tree = ast.parse((ROOT / "benchmarks" / "versus" / "helion_attention.py").read_text())
    bodies = {node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    full, causal = (set(bodies[name].splitlines()) for name in ("full", "causal"))
    more = {line.strip().split(" = ")[0] for line in causal - full if not line.startswith(("def", "    '", '    "'))}
    assert more == {"seen", "scores"}
