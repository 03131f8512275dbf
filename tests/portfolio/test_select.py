"""Which kernels come with evoattn: those that cover what was measured, one by one."""

from dataclasses import replace
from pathlib import Path

import pytest

from evoattn.cost.fitted import DATA as FITTED
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio import campaign
from evoattn.portfolio.kernels import DATA, KernelList, Skipped, kind_of, load, save
from evoattn.portfolio.pick import list_for, whole
from evoattn.portfolio.select import Kind, general, genes_of, measured_kinds, select

H200 = GPUS["h200"]
STARTING = load_space("flash_wgmma", H200).starting_configs()


def test_each_kernel_that_is_chosen_saves_most_beside_those_before_it() -> None:
    lost = {"all": {0: 0.2, 1: 0.2, 2: 0.2}, "first": {0: 0.0, 1: 0.9}, "last": {2: 0.0}, "same": {2: 0.195}}
    assert Kind(3, lost).covering() == ["all", "first", "last"]
    assert Kind().covering() == []


def campaign_of(folder: Path) -> Path:
    """Two problems with sinks: one kernel is the fastest on each, a third is wrong."""
    problems = [parse_shape(f"B=2,H=8,S={s},D=64,dtype=bf16,mask=full,sink=1") for s in (512, 4096)]
    kernels = [Kernel(c.family, c.params, "random", "right", 100) for c in STARTING[:2]]
    kernels[0].times, kernels[1].times = {0: 5.0, 1: 90.0}, {0: 9.0, 1: 50.0}
    wrong = Kernel(STARTING[2].family, STARTING[2].params, "random", "wrong: it differs", 100)
    group = Group("16 d64 full+sink", problems, ("flash_wgmma",), kernels={k.id: k for k in (*kernels, wrong)})
    path = folder / "c.jsonl.gz"
    campaign.save(path, [group], {"device": "NVIDIA H200"}, {})
    return path


@pytest.mark.slow
def test_a_kind_that_was_measured_gets_what_covers_it_and_others_keep_theirs(tmp_path: Path) -> None:
    path = campaign_of(tmp_path)
    kinds, _ = measured_kinds(campaign.load(path)[1])
    assert {name: kind.problems for name, kind in kinds.items()} == {"16 d64 sink": 2}
    first = select([path], H200, None, 2)
    assert first.cards == ("h200",) and set(first.kinds) == {"16 d64 sink"}
    assert {first.kernels[i].id for i in first.kinds["16 d64 sink"]} == {c.id for c in STARTING[:2]}
    again = select([], H200, first, 2)
    assert (again.kinds, again.kernels, again.genes) == (first.kinds, first.kernels, first.genes)
    other = select([path], H200, again, kinds=["16 d64 sink"])
    assert (other.kinds, other.general) == (first.kinds, first.general)
    bare = replace(first, kinds={"16 d64": (0,)})
    assert set(select([path], H200, bare, kinds=["16 d64"]).kinds) == {"16 d64"}
    assert set(select([path], H200, bare, kinds=["16 d64 sink"]).kinds) == {"16 d64", "16 d64 sink"}
    with pytest.raises(WrongUse, match="no times of kind '16 d65'"):
        select([path], H200, bare, kinds=["16 d64", "16 d65"])


def test_the_general_kernels_are_those_that_serve() -> None:
    problem = parse_shape("B=2,H=8,S=2000,D=64,dtype=bf16,mask=full")
    assert set(general(STARTING, [problem], H200, 1)) <= {c.id for c in STARTING}
    assert len(general(STARTING, [problem], H200, 1)) == 1, "the best of one problem saves all there is to save"


def test_splits_are_no_part_of_a_listed_kernel() -> None:
    split = load_space("split_kv", H200).starting_configs()
    assert {c["SPLITS"] for c in map(whole, split) if c["MERGE"] != "cluster"} == {1}
    assert genes_of(STARTING).keys() == {"flash_wgmma"}


H100 = GPUS["h100"]


def shipped() -> KernelList:
    found = load("sm_90a")
    assert found
    return found


def test_the_data_in_the_wheel_is_small() -> None:
    files = (*DATA.iterdir(), *FITTED.parent.iterdir())
    assert sum(f.stat().st_size for f in files) < 500_000


def test_a_file_that_is_read_and_saved_is_the_same(tmp_path: Path) -> None:
    save(tmp_path / "again", shipped())
    assert (tmp_path / "again").read_bytes() == (DATA / "sm_90a.json").read_bytes()


def test_every_kernel_is_of_todays_spaces_and_of_a_kind() -> None:
    listed = shipped()
    spaces = {family: load_space(family, H100) for family in listed.genes}
    for config in listed.kernels:
        assert spaces[config.family].make_config(config.params) == config
    places = {i for kind in listed.kinds.values() for i in kind} | set(listed.general)
    assert places == set(range(len(listed.kernels)))
    assert all(listed.kinds.values()) and len({c.id for c in listed.kernels}) == len(listed.kernels)


def test_a_parameter_that_is_younger_than_the_file_has_its_default(tmp_path: Path) -> None:
    config = load_space("flash_wgmma", H100).starting_configs()[0]
    older = replace(config, params={k: v for k, v in config.params.items() if k != "GROUP_ROWS"})
    genes = {"flash_wgmma": {name: [value] for name, value in older.params.items()}}
    skipped = (Skipped("fp32", 512, 128),)
    save(tmp_path / "sm_80.json", KernelList("sm_80", ("a100",), skipped, {}, genes, (older,), (0,), {"16 d64": (0,)}))
    read = load("sm_80", tmp_path)
    assert read and [*read.kernels] == [config] and read.cards == ("a100",) and read.skipped == skipped
    timed = parse_shape("B=1,H=1,S=64,D=64")
    assert read.of(timed) == ([config], [config]) and read.of(timed.with_(alibi=True)) == ([], [config])
    assert load("sm_75", tmp_path) is None


def test_a_kind_is_what_one_must_have_timed() -> None:
    causal = parse_shape("B=1,H=8,S=64,D=64,dtype=bf16,mask=causal")
    assert kind_of(causal) == kind_of(causal.with_(mask="full", dtype="fp16", batch=9)) == "16 d64"
    assert kind_of(causal.with_(dtype="fp32")) == "32 d64"
    assert kind_of(causal.with_(value_dim=32, sink=True)) == "16 d64 dv32 sink"


def test_newer_cards_take_the_newest_list_that_is_there() -> None:
    assert list_for(GPUS["h200"]) is list_for(GPUS["b200"]) is shipped()
    assert list_for(GPUS["l4"]) is list_for(GPUS["h100"]), "the oldest newer one"
    assert registry.FAMILIES.keys() >= shipped().genes.keys()
