"""Studies by name: made of the shape, listed, resumed, and searched for the best of a problem."""

import pytest

from evoattn.cli.run import resume_command
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS, DetectedDevice, GpuError
from evoattn.model.records import CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.shape_text import lookup, parse_shape
from evoattn.report.text import command
from evoattn.search.request import SearchWords
from evoattn.search.starting import starting_configs
from evoattn.storage import Storage, UnknownRecord
from evoattn.storage.storage import chosen_trial
from tests.cli.terminal import SHAPE, refused, run
from tests.support.prepared import prepare_search

H100 = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")


@pytest.fixture
def db(tmp_path):
    return tmp_path / "db.sqlite"


def begin(db, devices=(), **words):
    """The study of a search that is prepared and not run."""
    prepared = prepare_search(SearchWords(db=str(db), **words), list(devices))
    prepared.storage.close()
    return prepared


def add(db, study, *, cost=None, us=None, block_m=64):
    """A right trial, estimated or timed; returns its number."""
    storage = Storage.open(str(db))
    space = load_space("flash_mma", GPUS["h100"])
    config = starting_configs(space, parse_shape(SHAPE), GPUS["h100"])[0]
    timings = () if us is None else (Timing((us,) * 9, {"stage": "final", "run": "r"}),)
    state = TrialState.COMPLETE if timings else TrialState.ESTIMATED
    trial = storage.record(study, config, None, Evaluation(state, "", CompileInfo(), None, timings, relative_cost=cost))
    storage.close()
    return trial.number


def best(db, shape=None, gpu=None, study=None):
    storage = Storage.open(str(db))
    try:
        return chosen_trial(storage, "best", study, shape and parse_shape(shape), gpu and GPUS[gpu]).number
    finally:
        storage.close()


@pytest.mark.slow
def test_a_study_is_named_after_its_shape(db):
    shape = "B=1,H=16,S=1024,D=64"
    names = [begin(db, gpu="l4", shape=shape).study.name for _ in range(2)]
    assert names == ["b1_h16_s1024_d64_fp16_full_l4_offline", "b1_h16_s1024_d64_fp16_full_l4_offline_2"]
    assert begin(db, gpu="l4", problem="seed_s64").study.name == "seed_s64_l4_offline"
    assert begin(db, [H100], shape=shape).study.name == "b1_h16_s1024_d64_fp16_full_h100"
    assert begin(db, gpu="l4", shape=shape, study="mine").study.name == "mine"


@pytest.mark.slow
def test_a_shape_that_was_searched_before_is_noticed(db):
    first = begin(db, gpu="l4", shape=SHAPE)
    assert first.earlier is None and begin(db, gpu="l4", shape=SHAPE).earlier is None  # nothing was tried yet
    add(db, first.study, cost=1.0)
    assert begin(db, gpu="l4", shape=SHAPE).earlier == first.study
    for other in ({"gpu": "h100"}, {"shape": SHAPE + ",mask=causal"}):
        assert begin(db, **({"gpu": "l4", "shape": SHAPE} | other)).earlier is None
    assert begin(db, [H100], gpu="h100", shape=SHAPE).earlier is None, "timed ones are not resumed offline"


@pytest.mark.slow
def test_an_empty_study_is_nobodys_latest(db):
    assert begin(db, gpu="l4", shape=SHAPE).study.name == begin(db, resume=True).study.name
    tried = begin(db, gpu="l4", shape=SHAPE).study
    add(db, tried, cost=1.0)
    begin(db, gpu="l4", problem="seed_s64")
    assert begin(db, resume=True).study == tried
    assert best(db) == 1


@pytest.mark.slow
def test_the_best_of_a_problem_is_the_best_of_all_its_studies(db):
    one, two = (begin(db, gpu="l4", shape=SHAPE).study for _ in range(2))
    add(db, one, cost=7.0)
    winner = add(db, one, cost=3.0)
    latest = add(db, two, cost=5.0)
    assert best(db) == latest and best(db, study=one.name) == winner
    assert best(db, SHAPE) == best(db, SHAPE, "l4") == best(db, SHAPE + ",mask=full") == winner
    measured = add(db, begin(db, [H100], shape=SHAPE).study, us=9.0)
    faster = add(db, begin(db, [H100], shape=SHAPE).study, us=8.0)
    assert measured != faster and best(db, SHAPE, "h100") == faster and best(db, SHAPE, "l4") == winner
    add(db, begin(db, gpu="h100", shape=SHAPE).study, cost=0.1)
    assert best(db, SHAPE, "h100") == faster, "an estimate is never better than a time"
    with pytest.raises(UnknownRecord, match="--gpu h100 or --gpu l4"):
        best(db, SHAPE)
    with pytest.raises(UnknownRecord, match=r"No right trial of B=1 .* on a100 .*evoattn studies"):
        best(db, SHAPE, "a100")
    with pytest.raises(UnknownRecord, match="No right trial"):
        best(db, SHAPE + ",lse=1")


def test_a_named_problem_and_its_shape_are_one_problem(db):
    number = add(db, begin(db, gpu="l4", problem="seed_s64").study, cost=1.0)
    p = lookup("seed_s64")
    assert best(db, f"B={p.batch},H={p.heads},S={p.seqlen_q},D={p.head_dim}") == number


@pytest.mark.slow
def test_the_commands_take_the_best_of_a_shape(db):
    winner = add(db, begin(db, gpu="l4", shape=SHAPE).study, cost=1.0)
    add(db, begin(db, gpu="l4", problem="seed_s64").study, cost=2.0)
    words = ("--shape", SHAPE, "--gpu", "L4", "--db", db)
    assert f"{winner} of study b1_h2_s96_d32_fp16_full_l4_offline" in run("show", "best", *words).stdout
    refused(run("export", "best", "--problem", "seed_h100", "--db", db), 2, "No right trial", "evoattn studies")
    refused(run("show", "best", "--shape", SHAPE, "--gpu", "gtx", "--db", db), 2, "gtx", "l4")
    refused(run("export", "best", "--gpu", "h100", "--db", db), 2, "h100", "give a shape or a problem too")


@pytest.mark.slow
def test_a_number_beside_words_of_another_trial_is_refused(db):
    study = begin(db, gpu="l4", shape=SHAPE).study
    number = add(db, study, cost=1.0)
    begin(db, gpu="l4", problem="seed_s64")
    for words in (("--study", study.name), ("--shape", SHAPE), ("--shape", SHAPE, "--gpu", "l4")):
        assert f"{number} of study {study.name}" in run("show", number, *words, "--db", db).stdout
    for words in (("--study", "seed_s64_l4_offline"), ("--study", "nothing")):
        refused(run("export", number, *words, "--db", db), 2, f"Trial {number} is of study {study.name}, not")
    for words in (("--problem", "seed_s64"), ("--shape", SHAPE, "--gpu", "h100")):
        refused(run("show", number, *words, "--db", db), 2, f"is of study {study.name}, which is B=1 H=2 S=96 D=32")


def test_an_offline_study_goes_on_without_devices(db):
    name = begin(db, gpu="l4", shape=SHAPE).study.name
    with pytest.raises(GpuError, match=f"Study {name} is offline, so that nothing is timed: leave --devices out"):
        prepare_search(SearchWords(db=str(db), resume=True, devices="0"), [H100])


def test_the_command_that_goes_on_says_again_what_the_study_does_not_keep(db):
    words = SearchWords(db=str(db), devices="0,1", jobs=3, sanitize=True, seed=3, problem="seed_s64", gpu="h100")
    said = "evoattn search --resume --study mine --devices 0,1 --jobs 3 --db {} --sanitize"
    assert command(resume_command(words, "mine"), 200, "") == [said.format(db)]
    on_ray = SearchWords(ray="10.0.0.1:6379", study="x")
    assert command(resume_command(on_ray, "x"), 200, "") == ["evoattn search --resume --study x --ray 10.0.0.1:6379"]


@pytest.mark.slow
def test_studies_lists_what_is_there(db):
    add(db, begin(db, gpu="l4", shape=SHAPE).study, cost=1234.0)
    add(db, begin(db, [H100], problem="seed_h100_causal").study, us=12.5)
    begin(db, gpu="l4", problem="seed_s64")
    text = run("studies", "--db", db).stdout
    assert all(len(line) <= 80 for line in text.splitlines())
    words = " ".join(text.split())
    assert "b1_h2_s96_d32_fp16_full_l4_offline: 1 trial, best: relative cost 1,234 (trial 1)" in words
    assert "seed_h100_causal_h100: 1 trial, best: 12.50 µs (trial 2)" in words
    assert "h100, B=1 H=16 S=1024 D=64 fp16 causal_upper_left" in words
    assert "seed_s64_l4_offline: 0 trials, best: none right yet" in words


@pytest.mark.slow
def test_a_timed_study_is_resumed_only_where_its_gpu_is(db):
    name = begin(db, [H100], shape=SHAPE).study.name
    with pytest.raises(GpuError, match="there is no CUDA device here"):
        begin(db, resume=True)
    assert begin(db, [H100], resume=True).study.name == name
