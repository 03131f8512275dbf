"""ClimbCache that are kept on disk: the same in the next process, and never another's, whatever happens to the file."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio import climb as module
from evoattn.portfolio.climb import PACKAGE, ClimbCache, Climbed, Key, what_decides
from evoattn.portfolio.pick import canonical, next_picks, pick

H100 = GPUS["h100"]
PROBLEM = AttentionProblem(batch=49, heads=64, kv_heads=16, seqlen_q=39, seqlen_k=39, head_dim=64)
LATER_NS = 1 << 62
CONFIG = KernelConfig("flash_wgmma", {"BLOCK_M": 64, "OVERLAP": True, "STORE": "rows"})


def key(number: int) -> Key:
    return replace(PROBLEM, batch=number + 1), H100


def climbed(number: int) -> Climbed:
    return Climbed(
        CONFIG, 3 / 7 + number, 1 + number / 7, number, (KernelConfig("other", {"A": number}),) * (number % 3)
    )


def file_of(climbs: ClimbCache) -> Path:
    assert climbs.path
    return climbs.path


class Told(ClimbCache):
    """What an earlier process has found."""

    def add(self, key: Key, climbed: Climbed) -> None:
        raise AssertionError("this was known")


def test_the_next_process_has_the_same_pick_without_a_climb(tmp_path: Path) -> None:
    first = pick(PROBLEM, H100, ClimbCache(tmp_path))
    assert pick(PROBLEM, H100, Told(tmp_path)) == first == pick(PROBLEM, H100)
    longer = replace(PROBLEM, seqlen_q=40, seqlen_k=40)
    assert canonical(longer) == canonical(PROBLEM) and pick(longer, H100, Told(tmp_path)) == first


def test_another_problem_or_gpu_is_another_climb(tmp_path: Path) -> None:
    about, gpu = key(0)
    ClimbCache(tmp_path).add(key(0), climbed(0))
    others: list[Key] = [(replace(about, lse=True), gpu), (about, replace(gpu, sm_count=114))]
    assert [ClimbCache(tmp_path).get(other) for other in others] == [None] * 2
    again = ClimbCache(tmp_path)
    assert again.get(key(0)) == climbed(0) and again.get(key(0)) is again.get(key(0)), "a file is read once"


def test_a_config_that_cannot_serve_is_not_taken(tmp_path: Path) -> None:
    """Whatever the file says: each end of a climb is asked again whether it can run."""
    following = next(next_picks(PROBLEM, H100))
    wrong = KernelConfig(following.family, following.config.params | {"BLOCK_M": 4096})
    assert registry.lookup(following.family).why_impossible(PROBLEM, wrong, H100)
    kept = ClimbCache(tmp_path)
    kept.add((canonical(PROBLEM), H100), Climbed(wrong, 5.0, 2.0, 9))
    assert pick(PROBLEM, H100, ClimbCache(tmp_path)) == following


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of what decides a climb."""
    for room in module.ROOMS:
        shutil.copytree(PACKAGE / room, tmp_path / "evoattn" / room, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "spaces").mkdir()
    return tmp_path / "evoattn"


def state(package: Path) -> str:
    what_decides.cache_clear()
    return what_decides(package, package.parent / "spaces", LATER_NS)


@pytest.mark.parametrize("name", ["portfolio/data/sm_90a.json", "cost/data/fitted.npz"])
def test_other_data_of_the_same_size_and_age_are_another_state(package: Path, name: str) -> None:
    before, file = state(package), package / name
    data, about = bytearray(file.read_bytes()), file.stat()
    assert state(package) == before
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert state(package) != before


@pytest.mark.parametrize("name", ["portfolio/climb.py", "families/flash_wgmma/family.py", "cost/new.py", "model/x.py"])
def test_other_source_is_another_state(package: Path, name: str) -> None:
    before = state(package)
    (package / name).write_text("changed = True\n")
    assert state(package) != before


def test_other_search_spaces_are_another_state(package: Path) -> None:
    before = state(package)
    (package.parent / "spaces" / "one.yaml").write_text("{}")
    assert state(package) != before


def test_source_that_changed_under_a_process_is_no_state(package: Path) -> None:
    """Its climbs are by other code than lies on disk, and would be taken for those of that code."""
    spaces, file = package.parent / "spaces", package / "portfolio" / "climb.py"
    changed_ns = max(about[2] for room in module.ROOMS for about in module._source_files(str(package / room))) + 1
    os.utime(file, ns=(changed_ns, changed_ns))
    assert what_decides(package, spaces, changed_ns)
    assert what_decides(package, spaces, changed_ns - 1) == ""


def test_without_a_state_climbs_are_kept_in_memory(tmp_path: Path) -> None:
    def vanished() -> str:
        raise FileNotFoundError

    for kept in (ClimbCache(tmp_path / "op", str), ClimbCache(tmp_path / "op", vanished), ClimbCache()):
        kept.add(key(0), climbed(0))
        assert kept.path is None and kept.get(key(0)) == climbed(0) and kept.get(key(1)) is None
    assert not (tmp_path / "op").exists()


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = ClimbCache(tmp_path / "file" / "op")
    assert kept.get(key(0)) is None
    kept.add(key(0), climbed(0))
    assert kept.get(key(0)) == climbed(0)
