"""The files of kernels that the user's own searches found, and of races."""

import contextlib
import json
import os
import time
import warnings
from dataclasses import replace

import pytest

from evoattn.backends import appended
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.paths import data_folder
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.wins import Raced, Races, Win, Wins

H100 = GPUS["h100"]
PROBLEM = AttentionProblem(1, 8, 8, 512, 512, 64, "fp16", "causal_upper_left")
PARAMS = load_space("flash_mma", H100).starting[0]


def win(problem=PROBLEM, us=5.0, gpu="h100", params=PARAMS):
    return Win(gpu, 132, problem, "flash_mma", params, us, 9.0)


def test_a_win_is_found_again_by_its_problem_and_gpu(tmp_path):
    wins = Wins(tmp_path / "folder" / "wins.jsonl")
    assert wins.find(PROBLEM, H100) is None
    wins.add([win()])
    found = Wins(wins.path).find(PROBLEM, H100)
    assert found.family == "flash_mma"
    assert found.config.params == PARAMS
    assert found.why == "your search measured 5.00 µs, 9.00 µs before"
    assert not found.estimated
    assert wins.find(PROBLEM.with_(mask="causal_lower_right", layout="bshd"), H100), "the same numbers"
    others = (
        *({"batch": 2}, {"dtype": "bf16"}, {"lse": True}, {"heads": 16}, {"kv_heads": 4}, {"seqlen_k": 513}),
        *({"window": "100:0"}, {"softcap": 20.0}, {"sink": True}, {"alibi": True}, {"bias": "bhs"}, {"value_dim": 32}),
        *({"score": "s*2"}, {"shared_kv": True}, {"seqused": "1:512"}, {"seqused": "1:512", "page": 64}),
        *({"kv": "e4m3"}, {"dtype": "e4m3"}, {"value_dim": 32, "rotary_apart": True}),
        *({"blocks": "128x128:70+200"}, {"op": "backward"}, {"batch_invariant": True}, {"mask": "full"}),
    )
    for other in others:
        assert wins.find(PROBLEM.with_(**other), H100) is None, other
    alone = Wins(tmp_path / "alone.jsonl")
    alone.add([replace(win(), before_us=None)])
    assert "nothing else could be timed" in Wins(alone.path).find(PROBLEM, H100).why
    eight = PROBLEM.with_(kv="e4m3")
    wins.add([win(eight.with_(scales="head"))])
    assert wins.find(eight, H100) and wins.find(eight.with_(scales="token"), H100) is None
    assert wins.find(PROBLEM, GPUS["h200"]) is None
    assert wins.find(PROBLEM, replace(H100, sm_count=114)) is None


def test_a_later_win_replaces_an_earlier_one_and_others_stay(tmp_path):
    ours, theirs = Wins(tmp_path / "wins.jsonl"), Wins(tmp_path / "wins.jsonl")
    ours.add([win()])
    theirs.add([win(us=4.0), win(PROBLEM.with_(batch=2))])
    assert "4.00" in ours.find(PROBLEM, H100).why, "another process's change is seen"
    assert ours.find(PROBLEM.with_(batch=2), H100)


def test_wins_of_the_file_of_before_are_taken_over_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    old = data_folder() / "wins.json"
    old.parent.mkdir(parents=True)
    rows = ["no row", {"problem": {"mask": "a later mask"}}, win().to_row()]
    old.write_text(json.dumps({"version": 1, "wins": rows}))
    assert Wins().find(PROBLEM, H100).config.params == PARAMS
    Wins().add([win(us=4.0)])
    assert "4.00" in Wins().find(PROBLEM, H100).why, "what came later stays"
    for text in ("", "[]", "{", '{"wins": 5}', "[" * 10_000):
        Wins().path.unlink(missing_ok=True)
        old.write_text(text)
        assert Wins().find(PROBLEM, H100) is None


LATER = [
    lambda row: row | {"watts": 300},
    lambda row: row | {"problem": row["problem"] | {"dilation": 2}},
    lambda row: row | {"problem": row["problem"] | {"mask": "a later mask"}},
    lambda row: row | {"us": "5.0"},
    lambda row: row | {"before_us": ""},
    lambda row: row | {"family": ["flash_mma"]},
    lambda row: row | {"params": [1]},
    lambda row: row["problem"],
    lambda row: 7,
]


@pytest.mark.parametrize("change", LATER)
def test_a_row_that_cannot_be_read_is_passed_over_and_stays_in_the_file(tmp_path, change):
    path = tmp_path / "wins.jsonl"
    Wins(path).add([win(PROBLEM.with_(batch=batch)) for batch in (1, 2, 3)])
    second = win(PROBLEM.with_(batch=2))
    appended.append(path, appended.name_of(second.key), change(second.to_row()))
    before, wins = path.read_bytes(), Wins(path)
    with pytest.warns(RuntimeWarning, match=r"a kernel of .*wins.jsonl is passed over"):
        assert wins.find(PROBLEM.with_(batch=2), H100) is None
    assert wins.find(PROBLEM, H100) and wins.find(PROBLEM.with_(batch=3), H100)
    wins.add([win(PROBLEM.with_(batch=2), us=4.0)])
    assert "4.00" in Wins(path).find(PROBLEM.with_(batch=2), H100).why and path.read_bytes().startswith(before)


def test_a_config_that_the_space_no_longer_has_is_passed_over(tmp_path):
    wins = Wins(tmp_path / "wins.jsonl")
    wins.add([win(params=PARAMS | {"BLOCK_M": 7})])
    with pytest.warns(RuntimeWarning, match="is passed over"):
        assert wins.find(PROBLEM, H100) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wins.find(PROBLEM.with_(batch=5), H100) is None


def test_wins_that_cannot_be_written_serve_this_process(tmp_path):
    """The data folder is a file: as good as read-only, for root too."""
    (tmp_path / "data").write_text("")
    wins = Wins(tmp_path / "data" / "wins.jsonl")
    with pytest.warns(RuntimeWarning, match="cannot be written: what was found serves this process only"):
        wins.add([win()])
    assert wins.find(PROBLEM, H100)


def test_a_soft_cap_may_be_a_whole_number(tmp_path):
    wins = Wins(tmp_path / "wins.jsonl")
    wins.add([win(PROBLEM.with_(softcap=30))])
    assert wins.find(PROBLEM.with_(softcap=30.0), H100) and not wins.find(PROBLEM, H100)


def test_one_process_races_at_a_time_and_none_waits_for_ever(tmp_path):
    first, second = Races(tmp_path / "races.jsonl"), Races(tmp_path / "races.jsonl")
    for held in (True, False):
        started = time.monotonic()
        with first.turn() if held else contextlib.nullcontext(), second.turn(0.05):
            assert (time.monotonic() - started >= 0.05) == held
    (tmp_path / "no_folder").touch()
    with Races(tmp_path / "no_folder" / "races.jsonl").turn():
        pass


def test_a_file_has_the_races_that_last(tmp_path):
    path = tmp_path / "races.jsonl"
    races = Races(path)
    races.add(("kept",), Raced((3.0,), 4.0))
    assert Races(path).find(("kept",)) == Raced((3.0,), 4.0)
    races.add(("next",), Raced((5.12345, 7.0), 6.00049))
    races.add(("kernels",), Raced((5.0, 7.0)))
    races.add(("of this process",), Raced(()), lasts=False)
    assert Races(path).find(("next",)) == Raced((5.123, 7.0), 6.0), "nanoseconds are kept"
    assert Races(path).find(("kernels",)) == Raced((5.0, 7.0)) and not Races(path).find(("of this process",))
    row = path.read_text().splitlines()[1].split(" ", 2)[2]
    assert json.loads(row) == [[3.0], 4.0], "plain data"


def test_a_folder_that_a_race_makes_is_its_owner_s_alone_and_its_file_is_read(tmp_path):
    before = os.umask(0o002)
    try:
        races = Races(tmp_path / "data" / "kept" / "races.jsonl")
        with races.turn():
            races.add(("key",), Raced((3.0,), 4.0))
    finally:
        os.umask(before)
    assert Races(races.path).find(("key",)) == Raced((3.0,), 4.0)


@pytest.mark.parametrize("row", [[[1.0]], 7, {"us": [1.0], "torch": 2.0, "more": 0}, [["a"], None], [[1.0], [2.0]]])
def test_a_race_that_a_later_evoattn_wrote_otherwise_is_held_anew(tmp_path, row):
    races = Races(tmp_path / "races.jsonl")
    races._lines.add(("key",), row)
    assert Races(races.path).find(("key",)) is None
