"""Which measured times a fit is given: launches that the CPU was late with are found, slow kernels are kept, and
campaigns in columns are read as they were written."""

import math
from dataclasses import replace

import numpy as np
import pytest

from evoattn.cost import measurements
from evoattn.cost.cost import physical_part
from evoattn.cost.fitted import load
from evoattn.cost.measurements import Campaign
from evoattn.cost.training.rows import MOST_LATE, Row, launched_as_today, thinned, usual_us, with_genes, without_late
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, config_id

H100 = GPUS["h100"]
PROBLEMS = [parse_shape(f"B={b},H=16,S=512,D=64") for b in (1, 2, 4, 8)]
MORE = [parse_shape(f"B={b},H=16,S=512,D=64") for b in (3, 5, 6, 7, 9, 10)]
CONFIGS = load_space("flash_mma", H100).starting_configs()[:6]


def rows(factor=lambda problem, config: 1.0, problems=PROBLEMS):
    """Each kernel on each problem, as long as the physical part says, times a factor."""
    return [
        Row(H100, p, c, 128, 0, physical_part(p, c, H100, 128, load()).us * factor(i, j), "campaign")
        for i, p in enumerate(problems)
        for j, c in enumerate(CONFIGS)
    ]


def one_of(us):
    """Rows of which one takes `us`."""
    usual = rows()[len(CONFIGS) + 2].us
    return rows(lambda i, j: us / usual if (i, j) == (1, 2) else 1.0)


@pytest.mark.parametrize("us", (250, 400, 3000, 200_000))
def test_a_late_launch_is_left_out(us):
    late = one_of(us)
    kept = without_late(late)
    assert len(kept) == len(late) - 1 and us not in [round(row.us) for row in kept]


def test_a_time_that_no_late_launch_has_is_kept():
    assert without_late(one_of(90)) == one_of(90)
    slow = rows(lambda i, j: 4000.0 if (i, j) != (1, 2) else 20_000.0)  # no launch is late by so much
    assert without_late(slow) == slow


@pytest.mark.parametrize("slow", [lambda i, j: 400.0 if j == 2 else 1.0, lambda i, j: 400.0 if i == 1 else 1.0])
def test_a_kernel_that_is_always_slow_or_a_slow_problem_is_kept(slow):
    assert without_late(rows(slow)) == rows(slow)


def test_a_time_that_is_little_more_is_kept():
    slow = rows(lambda i, j: 3.0 if (i, j) == (1, 2) else 1.0)
    assert without_late(slow) == slow


@pytest.mark.parametrize(("times", "kept"), [(MOST_LATE, 0), (MOST_LATE + 1, MOST_LATE + 1)])
def test_a_kernel_that_is_often_slow_is_not_late(times, kept):
    """On few enough of its problems that its median is not slow."""
    slow = rows(lambda i, j: 400.0 if j == 2 and i < times else 1.0, PROBLEMS + MORE)
    assert len(slow) - len(without_late(slow)) == times - kept


def test_what_kernel_and_problem_let_expect():
    every = rows()
    assert all(math.exp(-0.5) < us / row.us < math.exp(0.5) for row, us in zip(every, usual_us(every), strict=True))


def test_kernels_whose_genes_are_gone_are_left_out():
    of_today, *others = rows()
    params = of_today.config.params
    gone = replace(of_today, config=KernelConfig("flash_mma", params | {"GONE": 1}))
    lacks = replace(of_today, config=KernelConfig("flash_mma", {k: v for k, v in params.items() if k != "WARPS"}))
    renamed = replace(of_today, config=KernelConfig("flash_mma", params | {"SCHEDULE": "gone"}))
    number = replace(of_today, config=KernelConfig("flash_mma", params | {"BLOCK_M": 7}))  # which says what it did
    assert with_genes([of_today, gone, lacks, renamed, number, *others]) == [of_today, number, *others]


def test_gradients_without_v_in_registers_are_not_in_the_fit():
    problem = parse_shape("B=8,H=16,S=1000,D=96,dtype=bf16,op=backward")
    start = next(c.params for c in load_space("backward_wgmma", H100).starting_configs() if c["BLOCK_M"] == 64)
    places = start | {"P_PLACE": "registers", "DS_PLACE": "registers", "PRODUCER": "warpgroup", "ORDER": "dv_last"}
    narrow, wide = (
        KernelConfig("backward_wgmma", places | {"BLOCK_M": rows, "BLOCK_N": 128, "DIM_GROUPS": 1}) for rows in (64, 80)
    )
    before, since, other = (
        Row(H100, problem, config, 168, 0, 200.0, "campaign", saved)
        for config, saved in ((narrow, "2026-11-28"), (narrow, "2026-11-29"), (wide, "2026-11-28"))
    )
    assert launched_as_today([before, since, other]) == [since, other]


def test_times_of_another_launch_are_not_in_the_fit():
    problem = parse_shape("B=5,H=12,Sq=494,Sk=6272,D=96,dtype=bf16")
    start = load_space("flash_wgmma", H100).starting_configs()[0].params | {"BLOCK_M": 192, "BLOCKS_PER_SM": 1}
    balanced, fixed = (KernelConfig("flash_wgmma", start | {"SCHEDULE": name}) for name in ("balanced", "fixed"))
    before, since, other = (
        Row(H100, problem, config, 128, 0, 200.0, "campaign", saved)
        for config, saved in ((balanced, "2026-11-22"), (balanced, "2026-11-23"), (fixed, "2026-11-22"))
    )
    assert launched_as_today([before, since, other]) == [since, other]


@pytest.mark.parametrize(("source", "kept"), [("campaign", 9), ("landscape", 24)])
def test_a_third_of_the_rows_that_are_kept_are_the_fastest(source, kept):
    """A landscape keeps eight times as many."""
    configs = load_space("flash_mma", H100).starting_configs()
    every = [Row(H100, PROBLEMS[0], configs[i % len(configs)], 128, 0, 10.0 + i, source) for i in range(24)]
    found = thinned(every, 9)
    assert len(found) == kept and {row.us for row in found} >= {10.0, 11.0, 12.0}


def kernel(block, times, rough=()):
    params = {"BLOCK_M": block}
    about = {"family": "flash_mma", "params": params, "id": config_id("flash_mma", params), "origin": "seed"}
    return about | {"state": "right", "registers": 90, "spill_bytes": 0, "times": times, "rough": list(rough)}


def made(name, us=5.25):
    kernels = [kernel(16, {"0": us, "1": 70000.125}, [1]), kernel(32, {}, [0])]
    final = {"kernels": [kernels[1]["id"]], "us": [[1 / 3], [None]], "peers": {"cudnn": [2.0, None]}}
    problems = [{"batch": 1}, {"batch": 2}]
    group = {"group": "16 d64 full", "problems": problems, "kernels": kernels, "final": final}
    bare = {"group": "32 d64 full", "problems": [], "kernels": [], "final": None}
    return Campaign(name, {"device": "a card", "saved": "2026-11-23"}, [group, bare])


def test_what_is_read_is_what_was_written(tmp_path):
    path = tmp_path / "card.npz"
    measurements.append(path, [made("b"), made("a")])
    assert measurements.read(path) == (made("a"), made("b")) and measurements.names(path) == ["a", "b"]
    with np.load(path, allow_pickle=False) as stored:
        assert stored["time ns"].max() == 70000125


def test_a_campaign_of_the_same_name_is_replaced(tmp_path):
    path = tmp_path / "card.npz"
    measurements.append(path, [made("a"), made("b")])
    measurements.append(path, [made("a", us=9.0)])
    assert measurements.campaign(path, "a") == made("a", us=9.0)
    assert measurements.campaign(path, "b") == made("b")
    with pytest.raises(KeyError):
        measurements.campaign(path, "c")
