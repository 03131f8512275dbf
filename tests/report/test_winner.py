"""What the summary says of the winner: settings, peer, ties, starting config, occupancy, instructions."""

from dataclasses import replace

import pytest

from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.report import summarise
from evoattn.report.analysis import MAX_DRAWN, family_samples
from evoattn.report.instructions import class_of, count_instructions
from evoattn.report.winner import fastest_peer, source_diff
from tests.report.report_studies import H100, add, make_study, timing

PREFILL = AttentionProblem(1, 8, 8, 1024, 1024, 64)


def test_settings_are_what_the_command_line_takes(storage):
    study = make_study(storage)
    add(storage, study, TrialState.COMPLETE, us=[("screen", 5.0)], BLOCK_M=64, SWIZZLE=True, EXP="lazy_5", SCALE=0.5)
    winner = summarise(storage, study).winner
    assert winner.settings == {"BLOCK_M": "64", "SWIZZLE": "true", "EXP": "lazy_5", "SCALE": "0.5"}
    assert winner.peer is None and winner.origin is None and winner.source == ""


def in_final(storage, study, times_us, peers_us):
    """One trial per time and the peers, 25 rounds of a final in which all noise is shared."""
    rounds = [1 + 0.01 * (n % 5) for n in range(25)]
    numbers = [add(storage, study, TrialState.COMPLETE, us=[("screen", us)], A=us).number for us in times_us]
    for number, us in zip(numbers, times_us, strict=True):
        storage.add_timing(number, Timing(tuple(us * r for r in rounds), {"stage": "final", "run": "f"}))
    for name, us in peers_us.items():
        storage.add_peer(study, name, Timing(tuple(us * r for r in rounds), {"stage": "final", "run": "f"}))
    return numbers


@pytest.mark.parametrize(
    ("peer_us", "tie", "sentence"),
    (
        (12.0, False, "1.20 × as fast as SDPA cudnn (12.24 µs), the fastest peer."),
        (10.001, True, "1.00 × as fast as SDPA cudnn (10.20 µs), the fastest peer: a tie."),
        (8.0, False, "0.80 × as fast as SDPA cudnn (8.16 µs), the fastest peer, which stays ahead."),
    ),
)
def test_the_fastest_peer_of_the_final_and_whether_it_ties(storage, peer_us, tie, sentence):
    study = make_study(storage)
    storage.add_peer(study, "flash", timing(1.0, "screen"))  # alone: its ratio would not be fair
    in_final(storage, study, [10.0], {"math": 30.0, "cudnn": peer_us})
    summary = summarise(storage, study)
    peer = summary.winner.peer
    assert (peer.backend, peer.tie) == ("cudnn", tie) and peer.speedup == pytest.approx(peer_us / 10)
    assert summary.peer_verdict == sentence


def test_of_one_peer_that_was_timed_twice_alike_either_is_the_fastest():
    ours, theirs = (Timing((us, us), {"run": "f"}) for us in (10.0, 12.0))
    found = fastest_peer(
        ours,
        {
            "flash": [theirs, replace(theirs, protocol={"run": "f", "again": 1})],
            "math": [Timing((11.0,), {"run": "g"})],
        },
    )
    assert (found.backend, found.median_us, found.speedup) == ("flash", 12.0, 1.2)


def test_finalists_that_tie_with_the_winner_are_named(storage):
    study = make_study(storage)
    numbers = in_final(storage, study, [10.0, 10.001, 11.0], {})
    assert summarise(storage, study).winner.tied_with == (numbers[1],)


def with_source(storage, study, family, params, us, operator, source):
    config = KernelConfig(family, params)
    candidate = Candidate(family, params, config.id, source, "sm_90a")
    evaluation = Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=64), timings=(timing(us, "screen"),))
    return storage.record(study, config, candidate, evaluation, (), operator).number


def test_the_winner_beside_the_best_starting_config_of_its_family(storage):
    study = make_study(storage)
    with_source(storage, study, "flash_mma", {"A": 9}, 9.0, "starting", "other\n")
    with_source(storage, study, "flash_scalar", {"A": 1, "B": 1}, 12.0, "starting", "slow\n")
    start = with_source(storage, study, "flash_scalar", {"A": 1, "B": 2}, 10.0, "starting", "int a = 1;\nint b = 2;\n")
    best = with_source(storage, study, "flash_scalar", {"A": 3, "B": 2}, 8.0, "mutation", "int a = 3;\nint b = 2;\n")
    winner = summarise(storage, study).winner
    assert winner.row.trial == best and winner.source == "int a = 3;\nint b = 2;\n"
    origin = winner.origin
    assert (origin.trial, origin.changes, origin.in_final) == (start, {"A": (1, 3)}, False)
    assert origin.gain == pytest.approx(0.2)
    assert origin.source_diff.splitlines()[-3:] == ["-int a = 1;", "+int a = 3;", " int b = 2;"]


def test_a_winner_of_a_family_without_starting_configs_is_not_compared_gene_by_gene(storage):
    study = make_study(storage)
    start = with_source(storage, study, "flash_mma", {"A": 9}, 9.0, "starting", "other\n")
    with_source(storage, study, "flash_scalar", {"A": 3}, 8.0, "random", "ours\n")
    origin = summarise(storage, study).winner.origin
    assert (origin.trial, origin.family, origin.changes, origin.source_diff) == (start, "flash_mma", {}, "")


def test_a_source_that_is_missing_has_no_difference():
    assert source_diff("", "a", "x", "y") == "" and source_diff("a\n", "a\n", "x", "y") == ""


@pytest.mark.parametrize(
    ("registers", "threads", "smem_bytes", "limits"),
    (  # the CUDA occupancy calculator's rules: 256 registers per warp allocation, 128 bytes, 1 KiB reserved per block
        (168, 384, 200_000, {"registers": 1, "shared memory": 1, "threads": 5, "blocks": 32}),
        (32, 64, 0, {"registers": 32, "shared memory": 228, "threads": 32, "blocks": 32}),
        (40, 128, 48 * 1024, {"registers": 12, "shared memory": 4, "threads": 16, "blocks": 32}),
    ),
)
def test_blocks_that_each_resource_allows(registers, threads, smem_bytes, limits):
    assert H100.block_limits(registers, threads, smem_bytes) == limits
    assert H100.blocks_resident(registers, threads, smem_bytes) == min(limits.values())


def test_occupancy_of_every_launch_names_its_limit(timed):
    row = summarise(*timed).leaderboard[0]
    family = registry.lookup(row.family)
    assert len(row.launches) >= 1 and family.name in row.launches[0].kernel
    for launch in row.launches:
        assert launch.blocks_per_sm == min(launch.limits.values())
        assert launch.limited_by == tuple(n for n, blocks in launch.limits.items() if blocks == launch.blocks_per_sm)
        assert launch.occupancy == launch.blocks_per_sm * launch.threads / lookup("h100").threads_per_sm
    assert row.smem_bytes == max(launch.smem_bytes for launch in row.launches)


def test_the_best_of_each_family_and_its_sample(timed):
    storage, study = timed
    summary = summarise(storage, study, 3)
    assert summary.best_of_families[0].family == summary.winner.row.family
    assert {row.family for row in summary.best_of_families} == set(summary.right_by_family)
    for sample in summary.samples:
        assert sample.value == sorted(sample.value) and len(sample.trial) == summary.right_by_family[sample.family]
        best = storage.trial(sample.trial[0])
        assert {n: sample.values[n][column[0]] for n, column in sample.columns.items()} == best.config


def test_a_sample_of_many_trials_keeps_the_best(timed):
    trial = next(iter(timed[0].iter_trials(timed[1])))
    (sample,) = family_samples({"flash_mma": [(trial, float(n)) for n in range(5 * MAX_DRAWN)]})
    best, others = sample.value[: MAX_DRAWN // 2], sample.value[MAX_DRAWN // 2 :]
    assert len(sample.value) == MAX_DRAWN and best == list(range(MAX_DRAWN // 2))
    assert others == list(range(MAX_DRAWN // 2, 5 * MAX_DRAWN, 9))


@pytest.mark.parametrize(
    ("opcode", "name"),
    (
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "tensor cores"),
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", "tensor cores"),
        ("wgmma.wait_group.sync.aligned", "barriers and fences"),
        ("cp.async.cg.shared.global", "asynchronous copies"),
        ("cp.async.wait_group", "barriers and fences"),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes", "asynchronous copies"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "shared memory"),
        ("ld.shared.v4.u32", "shared memory"),
        ("ld.global.nc.v4.u32", "global memory"),
        ("ld.param.u64", "moves and parameters"),
        ("ex2.approx.ftz.f32", "special functions"),
        ("fma.rn.ftz.f32", "floating point"),
        ("setp.gt.f32", "floating point"),
        ("cvt.rn.f16x2.f32", "conversions"),
        ("shfl.sync.bfly.b32", "shuffles and votes"),
        ("bra.uni", "branches"),
        ("bar.sync", "barriers and fences"),
        ("mad.lo.s32", "integers and logic"),
        ("xor.b32", "integers and logic"),
    ),
)
def test_classes_of_instructions(opcode, name):
    assert class_of(opcode) == name


@pytest.mark.slow
def test_instructions_of_a_source_are_counted_in_another_process():
    kernel = """extern "C" __global__ void k(float* x) {
        x[threadIdx.x] = exp2f(x[threadIdx.x]) + __shfl_xor_sync(~0u, x[0], 1);
    }"""
    counts = count_instructions(kernel, "sm_80")["k"]
    assert counts["special functions"] == 1 and counts["shuffles and votes"] == 1 and counts["global memory"] == 3
    assert count_instructions("this is no CUDA", "sm_80") == "Not counted: the kernel could not be compiled here."
    assert count_instructions("", "sm_80") == "No source is recorded."


def test_an_estimated_winner_says_what_bounds_it_and_how_far_such_choices_have_been(storage):
    spec = lookup("l4")
    study = storage.create_study("offline", PREFILL, spec, True, "random", 0, ("flash_mma",), {}, {})
    config = load_space("flash_mma", spec).starting_configs()[0]
    candidate = Candidate("flash_mma", config.params, config.id, "source", "sm_89")
    storage.record(study, config, candidate, Evaluation(TrialState.ESTIMATED, relative_cost=1.0), (), "random")
    bound, far = summarise(storage, study).winner.estimate
    assert bound.startswith("Bound by ") and "of the relative cost" in bound and "µs" not in bound
    assert "times the best time on an H100" in far and far.startswith("Among this card's families")
    assert "Nothing was measured on the L4" in far


def test_a_config_that_is_none_of_todays_says_nothing(storage):
    study = storage.create_study("odd", PREFILL, lookup("l4"), True, "random", 0, ("flash_mma",), {}, {})
    config = KernelConfig("flash_mma", {"OLD": 1})
    candidate = Candidate("flash_mma", config.params, config.id, "source", "sm_89")
    storage.record(study, config, candidate, Evaluation(TrialState.ESTIMATED, relative_cost=1.0), (), "random")
    assert summarise(storage, study).winner.estimate == ()
