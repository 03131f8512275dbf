"""Recorded landscapes are read as they were recorded, cut short or not, and as columns."""

import pytest

from evoattn.cost import landscapes, measurements
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.space import load_space

H100 = GPUS["h100"]


def test_a_file_that_was_cut_short_is_whole_up_to_its_last_member(tmp_path):
    path = tmp_path / "l.jsonl.gz"
    landscapes.append(path, [{"a": 1}, {"a": 2}])
    whole = path.stat().st_size
    landscapes.append(path, [{"a": 3}])
    assert landscapes.read_rows(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    path.write_bytes(path.read_bytes()[: whole + 9])
    assert landscapes.read_rows(path) == [{"a": 1}, {"a": 2}]


def _kernel(number, params, us, compile_s=0.5):
    return {"kernel": number, "of": "g", "family": "flash_wgmma", "params": params, "origin": "random",
            "state": "right", "registers": 90, "spills": 0, "compile_s": compile_s, "device_s": 0.01, "us": {"0": us},
            "rough": [], "valid": [0]}  # fmt: skip


def test_two_files_of_a_problem_are_one_landscape_at_the_speed_of_the_later_board(tmp_path):
    space = load_space("flash_wgmma", H100)
    genes = {p.name: list(p.values) for p in space.parameters}
    fewer = {name: values for name, values in genes.items() if name != "GROUP_ROWS"}
    params = [c.params for c in space.starting_configs() if not c.params["GROUP_ROWS"]][:6]
    problem, never_timed = (lookup(name).to_dict() for name in ("seed_h100", "seed_l4_s512"))
    for path, names, rows in (
        ("a", fewer, [_kernel(i, [p[n] for n in fewer], 10.0 + i) for i, p in enumerate(params[:4])]),
        ("b", genes, [_kernel(i, [p[n] for n in genes], 11.0 + 1.1 * i, 0) for i, p in enumerate(params[:3])]
         + [_kernel(3, [params[5][n] for n in genes], 9.0, 0.8)]),
    ):  # fmt: skip
        head = {"about": {"gpu": "h100"}, "genes": {"flash_wgmma": names}}
        landscapes.append(tmp_path / path, [head, {"group": "g", "problems": [problem, never_timed]}, *rows])
    (one,) = landscapes.load(tmp_path / "a", tmp_path / "b")
    assert [c.params for c in one.configs] == [*params[:4], params[5]] and one.best == 9.0
    assert [c.us for c in one.configs] == pytest.approx([11.0, 12.1, 13.2, 14.3, 9.0])
    assert [c.compile_s for c in one.configs] == [0.8, 0.8, 0.8, 0.5, 0.8]  # what was there already: the median
    (alone,) = landscapes.load(tmp_path / "a")
    assert [c.us for c in alone.configs] == [10.0, 11.0, 12.0, 13.0] and "GROUP_ROWS" not in alone.configs[0].params


def test_problems_that_only_one_file_times_are_its_own_and_two_at_one_index_are_refused(tmp_path):
    space = load_space("flash_wgmma", H100)
    genes = {p.name: list(p.values) for p in space.parameters}
    params = [space.starting_configs()[0].params[name] for name in genes]
    head = {"about": {"gpu": "h100"}, "genes": {"flash_wgmma": genes}}
    for path, problem, rows in (
        ("nothing", "seed_l4_s512", []),
        ("one", "seed_h100", [_kernel(0, params, 10.0)]),
        ("other", "seed_l4_s512", [_kernel(0, params, 10.0)]),
    ):
        group = {"group": "g", "problems": [lookup(problem).to_dict()]}
        landscapes.append(tmp_path / path, [head, group, *rows])
    (found,) = landscapes.load(tmp_path / "nothing", tmp_path / "one")
    assert found.problem == lookup("seed_h100") and found.best == 10.0
    with pytest.raises(ValueError, match="different problems of 'g' at index 0"):
        landscapes.load(tmp_path / "one", tmp_path / "other")


def test_columns_hold_what_was_recorded(tmp_path):
    space = load_space("flash_wgmma", H100)
    genes = {p.name: list(p.values) for p in space.parameters}
    params = [[c.params[name] for name in genes] for c in space.starting_configs()[:4]]
    rows = [_kernel(i, values, 3.7912 + i) for i, values in enumerate(params)]
    rows[1] |= {"us": {}, "state": "compile: too many registers", "compile_s": 0}
    rows[2] |= {"us": {"0": 3.7912, "2": 70000.5}, "rough": [2], "valid": [2]}
    problems = [lookup(name).to_dict() for name in ("seed_h100", "seed_l4_s512", "seed_l4_s512")]
    head = {"about": {"gpu": "h100", "saved": "2026-11-24"}, "genes": {"flash_wgmma": genes}}
    path = tmp_path / "mine.jsonl.gz"
    landscapes.append(path, [head, {"group": "g", "problems": problems}, *rows, {"kernel": 2, "again": {"2": 7e4}}])
    measurements.append(tmp_path / "kept.npz", [landscapes.recording(path)])
    assert landscapes.recording(tmp_path / "kept.npz" / "mine") == landscapes.recording(path)
    kept = landscapes.load(tmp_path / "kept.npz" / "mine")
    assert kept == landscapes.load(path) and [len(one.configs) for one in kept] == [3, 1]
    assert [(c.us, c.best_us, c.rough) for c in kept[1].configs] == [(70000.5, 70000.0, True)]
    assert [c.us for c in kept[0].elsewhere] == [3.7912]


def test_the_repository_has_landscapes():
    assert [path.name for path in landscapes.files()] == ["h100-a", "h100-b", "h100-c", "h100-d", "h100-e", "h200-a"]
