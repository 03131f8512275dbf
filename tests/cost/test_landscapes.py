"""Recorded landscapes are read as they were recorded, and campaigns as landscapes."""

import pytest

from evoattn.cost import landscapes, measurements
from evoattn.cost.measurements import Campaign
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.space import config_id
from evoattn.portfolio.workload import BUILD_SEEDS

H100 = GPUS["h100"]
SPACE = load_space("flash_wgmma", H100)
GENES = {p.name: list(p.values) for p in SPACE.parameters}
PARAMS = [c.params for c in SPACE.starting_configs() if not c.params["GROUP_ROWS"]][:6]


def kernel(params, us, **more):
    made = {
        "family": "flash_wgmma",
        "origin": "random",
        "state": "right",
        "registers": 90,
        "spill_bytes": 0,
        "rough": [],
    }
    made |= {"compile_s": 0.5, "device_s": 0.01, "valid": [0], "again": {}, "times": {"0": us}} | more
    return made | {"params": params, "id": config_id("flash_wgmma", params)}


@pytest.fixture
def kept(tmp_path):
    """Keeps recordings: their paths, by name."""

    def keep(genes=GENES, **recordings):
        about = {"gpu": "h100", "saved": "2026-11-24", "genes": {"flash_wgmma": genes}}
        groups = {
            name: [{"group": "g", "problems": [lookup(p).to_dict() for p in problems], "kernels": rows, "final": None}]
            for name, (problems, rows) in recordings.items()
        }
        measurements.append(tmp_path / "kept.npz", [Campaign(name, about, group) for name, group in groups.items()])
        return [tmp_path / "kept.npz" / name for name in recordings]

    return keep


def test_two_recordings_of_a_problem_are_one_landscape_at_the_speed_of_the_later_board(kept):
    fewer = {name: values for name, values in GENES.items() if name != "GROUP_ROWS"}
    old = [kernel({n: p[n] for n in fewer}, 10.0 + i) for i, p in enumerate(PARAMS[:4])]
    new = [kernel(p, 11.0 + 1.1 * i, compile_s=0.0) for i, p in enumerate(PARAMS[:3])]
    problems = ["seed_h100", "seed_l4_s512"]
    paths = [*kept(fewer, a=(problems, old)), *kept(b=(problems, [*new, kernel(PARAMS[5], 9.0, compile_s=0.8)]))]
    (one,) = landscapes.load(*paths)
    assert [c.params for c in one.configs] == [*PARAMS[:4], PARAMS[5]] and one.best == 9.0
    assert [c.us for c in one.configs] == pytest.approx([11.0, 12.1, 13.2, 14.3, 9.0])
    assert [c.compile_s for c in one.configs] == [0.8, 0.8, 0.8, 0.5, 0.8]  # what was there already: the median
    (alone,) = landscapes.load(paths[0])
    assert [c.us for c in alone.configs] == [10.0, 11.0, 12.0, 13.0] and "GROUP_ROWS" not in alone.configs[0].params


def test_problems_that_only_one_recording_times_are_its_own_and_two_at_one_index_are_refused(kept):
    one = [kernel(PARAMS[0], 10.0)]
    nothing, first, other = kept(
        nothing=(["seed_l4_s512"], []), first=(["seed_h100"], one), other=(["seed_l4_s512"], one)
    )
    (found,) = landscapes.load(nothing, first)
    assert found.problem == lookup("seed_h100") and found.best == 10.0
    with pytest.raises(ValueError, match="different problems of 'g' at index 0"):
        landscapes.load(first, other)


def test_columns_hold_what_was_recorded(kept):
    rows = [kernel(params, 3.7912 + i) for i, params in enumerate(PARAMS[:4])]
    rows[1] |= {"times": {}, "state": "compile: too many registers", "compile_s": 0}
    rows[2] |= {"times": {"0": 3.7912, "2": 70000.5}, "rough": [2], "valid": [2], "again": {"2": 7e4}}
    (path,) = kept(mine=(["seed_h100", "seed_l4_s512", "seed_l4_s512"], rows))
    assert measurements.recorded(path).groups[0]["kernels"] == rows
    found = landscapes.load(path)
    assert [len(one.configs) for one in found] == [3, 1]
    assert [(c.us, c.best_us, c.rough) for c in found[1].configs] == [(70000.5, 70000.0, True)]
    assert [c.us for c in found[0].elsewhere] == [3.7912]


def test_a_campaign_is_read_as_landscapes(tmp_path):
    fields = ("compile_s", "device_s", "valid", "again")
    rows = [{n: v for n, v in kernel(p, 5.0 + i).items() if n not in fields} for i, p in enumerate(PARAMS[:3])]
    groups = [{"group": "g", "problems": [lookup("seed_h100").to_dict()], "kernels": rows, "final": None}]
    measurements.append(tmp_path / "h100.npz", [Campaign("c", {"device": "NVIDIA H100 80GB HBM3"}, groups)])
    (one,) = landscapes.load(tmp_path / "h100.npz" / "c")
    assert [c.us for c in (*one.configs, *one.elsewhere)] == [5.0, 6.0, 7.0] and one.about["gpu"] == "h100"
    assert {c.compile_s for c in one.configs} == {landscapes.COMPILE_SECONDS} and "flash_wgmma" in one.genes


def test_the_repository_has_landscapes_of_problems_that_nothing_is_built_from():
    assert [path.name for path in landscapes.files()] == ["h100-a", "h100-b", "h100-c", "h100-d", "h100-e", "h200-a"]
    assert not set(range(200, 400)) & set(BUILD_SEEDS)  # reports/replays.md: the seeds of their problems
