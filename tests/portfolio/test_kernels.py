"""The kernels that come with evoattn: what the file says is read, and each can run where it is said to be fast."""

from dataclasses import replace
from pathlib import Path

from evoattn.cost.fitted import DATA as FITTED
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.kernels import DATA, KernelList, Skipped, kind_of, load, save
from evoattn.portfolio.pick import list_for

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
