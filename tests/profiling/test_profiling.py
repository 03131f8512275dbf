"""Hardware counters: ncu's table read, kept with the trial and shown beside a peer's; and sentences where there are
none."""

import csv
import io
import json
import subprocess
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompileInfo, Evaluation, KernelCounters, Profile, TrialState
from evoattn.profiling.ncu import FORBIDDEN, NOT_INSTALLED, Counted, ProfileError, count, parse
from evoattn.report import render_html, render_json, summarise
from evoattn.report.show import print_trial
from evoattn.search.profiled import Profiled, profile_trial
from evoattn.search.recorded import ReproduceError
from evoattn.search.starting import starting_configs
from evoattn.storage import Storage
from tests.storage.storage_records import PROBLEM, timing

H100 = GPUS["h100"]
NAMES = {
    "gpu__time_duration.sum": ("ns", "12,345"),
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": ("%", "61.5"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": ("%", "48.25"),
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": ("%", "n/a"),
    "lts__t_sector_hit_rate.pct": ("%", "nan"),
    "launch__registers_per_thread": ("register/thread", "168"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "2.5"),
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio": ("inst", "0.75"),
    "smsp__average_warps_issue_stalled_sleeping_per_issue_active.ratio": ("inst", "0"),
}


def table(*kernels: str, **changed: str) -> str:
    """A table in the form of `ncu --csv --page raw`."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["ID", "Process ID", "Kernel Name", *NAMES])
    writer.writerow(["", "", "", *(unit for unit, _ in NAMES.values())])
    for number, kernel in enumerate(kernels):
        values = [changed.get(name.split("__")[1].split(".")[0], value) for name, (_, value) in NAMES.items()]
        writer.writerow([number, 4711, kernel, *values])
    return text.getvalue()


def test_the_table_is_read_and_what_a_gpu_lacks_is_left_out():
    first, second = parse(table("flash_wgmma", "merge"))
    assert (first.kernel, first.us, second.kernel) == ("flash_wgmma", 12.345, "merge")
    assert first.counters == {
        "SM busy, % of peak": 61.5,
        "tensor cores, % of peak": 48.25,
        "registers per thread": 168.0,
        "stalled: long scoreboard": 2.5,
        "stalled: wait": 0.75,
    }


@pytest.mark.parametrize("text", ["", "\n\n\n", '"ID","x"\n"",""\n', table(), table("k", time_duration="n/a")])
def test_another_table_is_a_sentence(text):
    with pytest.raises(ProfileError, match="that evoattn cannot read"):
        parse(text)


def ncu(code: int = 0, log: str = "", err: str = ""):
    """A stand-in for running ncu: it writes `log` where it was told to. Its commands are kept in `seen`."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        run.seen.append(command)
        if "--version" in command:
            return subprocess.CompletedProcess(
                command, 0, "NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0 (build 1)", ""
            )
        job = json.loads((Path(command[-1]) / "job.json").read_text())
        run.jobs.append(job | {"cubin": (Path(command[-1]) / "kernel.cubin").exists()})
        Path(command[command.index("--log-file") + 1]).write_text(log)
        return subprocess.CompletedProcess(command, code, "", err)

    run.seen, run.jobs = [], []
    return run


def test_ncu_is_told_what_to_run_and_leaves_the_clocks_alone():
    run = ncu(log="==PROF== Connected to process 1\n" + table("k"))
    counted = count(PROBLEM, "cudnn", "warm", find=lambda: "/usr/bin/ncu", run=run)
    assert counted == Counted(table("k"), "ncu 2025.3.1.0")
    command = run.seen[0]
    options = {word: command[n + 1] for n, word in enumerate(command) if word.startswith("--")}
    assert options["--clock-control"] == "none" and options["--cache-control"] == "none"
    assert options["--profile-from-start"] == "off" and options["--print-units"] == "base"
    assert run.jobs[0]["peer"] == "cudnn" and not run.jobs[0]["cubin"]
    cold = ncu(log=table("k"))
    count(PROBLEM, "cudnn", "cold", find=lambda: "ncu", run=cold)
    assert cold.seen[0][cold.seen[0].index("--cache-control") + 1] == "all"


def hang(command):
    raise subprocess.TimeoutExpired(command, 1)


@pytest.mark.parametrize(
    "run, sentence",
    [
        (ncu(1, "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to …"), FORBIDDEN),
        (
            ncu(1, "==PROF== Connected\n==ERROR== The application returned an error code (1).", "ValueError: no\n"),
            "no.",
        ),
        (ncu(0, "==WARNING== No kernels were profiled."), "read no counters (exit code 0): no output."),
        (ncu(255, "==ERROR== Failed to initialize the profiler: LibraryNotLoaded\n"), "profiler: LibraryNotLoaded."),
        (hang, "ncu did not end within 180 s."),
    ],
)
def test_where_there_are_no_counters_one_sentence_says_why(run, sentence):
    with pytest.raises(ProfileError) as caught:
        count(PROBLEM, "cudnn", "warm", find=lambda: "ncu", run=run)
    assert str(caught.value).endswith(sentence) and "\n" not in str(caught.value)
    with pytest.raises(ProfileError, match="is not installed"):
        count(PROBLEM, "cudnn", "warm", find=lambda: None)
    assert NOT_INSTALLED


@pytest.fixture
def recorded(tmp_path):
    """A database with a study of one right trial, in a final with two peers."""
    storage = Storage.open(str(tmp_path / "db.sqlite"))
    study = storage.create_study("s", PROBLEM, H100, False, "genetic", 0, ("flash_mma",), {"device": "NVIDIA H100"}, {})
    config = starting_configs(load_space("flash_mma", H100), PROBLEM, H100)[0]
    candidate = render(registry.lookup("flash_mma"), PROBLEM, config, H100)

    def final(us):
        made = timing("final", *[us] * 25)
        return type(made)(made.samples_us, made.protocol | {"run": "r"})

    evaluation = Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=128), None, (final(20.0),))
    trial = storage.record(study, config, candidate, evaluation)
    storage.add_peer(study, "flash", final(30.0))
    storage.add_peer(study, "cudnn", final(25.0))
    yield storage, study, trial
    storage.close()


def counting(seen, failing=()):
    def read(problem, contestant, cache):
        seen.append(contestant if isinstance(contestant, str) else contestant.config.id)
        assert isinstance(contestant, str) or contestant.compiled.cubin
        if contestant in failing:
            raise ProfileError("It fails.")
        name = "cudnn_generated" if isinstance(contestant, str) else "flash_mma"
        return Counted(table(name, time_duration="25000" if isinstance(contestant, str) else "20000"), "ncu 2025.3.1")

    return read


def here(*_):
    """The trial's device."""


@pytest.mark.slow
def test_counters_are_kept_and_shown_beside_the_fastest_peers(recorded):
    storage, study, trial = recorded
    seen = []
    ours, theirs = profile_trial(storage, trial, study, count=counting(seen), require_device=here)
    assert seen == [trial.config_id, "cudnn"] and isinstance(theirs, Profiled) and theirs.profile.peer == "cudnn"
    assert storage.profile(trial.number).kernels == ours.profile.kernels
    assert storage.peer_profiles(study)["cudnn"].kernels[0].us == 25.0
    screen = Console(width=160, record=True, file=io.StringIO())
    print_trial(storage, trial, screen)
    shown = screen.export_text()
    assert "Hardware counters" in shown and "SDPA cudnn" in shown and "cudnn_generated" in shown
    assert next(line for line in shown.splitlines() if "time, µs" in line).split()[2:] == ["20", "25"]
    summary = summarise(storage, study)
    assert json.loads(render_json(summary))["counters"]["columns"] == [f"trial {trial.number}", "SDPA cudnn"]
    page = render_html(summary, count=lambda source, arch: "")
    assert 'id="counters"' in page and "stalled: long scoreboard" in page and "ncu 2025.3.1" in page
    assert "<td>tensor cores, % of peak</td>" in page


@pytest.mark.slow
def test_the_latest_counters_count_and_a_peer_may_be_chosen_or_fail(recorded):
    storage, study, trial = recorded
    list(profile_trial(storage, trial, study, count=counting([]), require_device=here))
    seen = []
    _, said = profile_trial(
        storage, trial, study, "flash", count=counting(seen, failing=["flash"]), require_device=here
    )
    assert seen == [trial.config_id, "flash"] and said == "Peer flash: It fails."
    newest = Profile("", "ncu 2", "warm", (KernelCounters("k", 1.0, {}),))
    storage.add_profile(study, newest, trial.number)
    assert storage.profile(trial.number).tool == "ncu 2"


def test_a_trial_that_was_never_timed_or_is_not_ours_is_not_run(recorded):
    storage, study, trial = recorded
    wrong = storage.record(
        study, type("C", (), {"family": "f", "params": {}, "id": "x"}), None, Evaluation(TrialState.TIMEOUT)
    )
    with pytest.raises(ReproduceError, match="is TIMEOUT: counters are read of kernels that were timed"):
        next(profile_trial(storage, wrong, study, count=counting([]), require_device=here))
    foreign = Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=1), None, (timing("screen", 1.0),))
    config = starting_configs(load_space("flash_mma", H100), PROBLEM, H100)[0]
    candidate = render(registry.lookup("flash_mma"), PROBLEM, config, H100)
    evil = type(candidate)(candidate.family, candidate.config, "other", "// evil", candidate.arch)
    trial = storage.record(study, config, evil, foreign)
    with pytest.raises(ReproduceError, match="--trust-source"):
        next(profile_trial(storage, trial, study, count=counting([]), require_device=here))


def test_without_its_device_it_is_a_sentence(recorded):
    storage, study, trial = recorded
    with pytest.raises(ReproduceError, match="was timed on the GPU h100"):
        next(profile_trial(storage, trial, study, count=counting([])))


def test_the_command_says_in_one_sentence_why_it_cannot(recorded):
    storage, _, trial = recorded
    said = CliRunner().invoke(app, ["profile", "best", "--db", storage.place])
    assert said.exit_code == 1 and f"Trial {trial.number} was timed on the GPU h100" in said.output
    assert said.output.count("\n") == 1


@pytest.mark.slow
def test_a_damaged_profile_is_a_sentence(recorded):
    from sqlalchemy import create_engine, text

    from evoattn.storage import StorageError

    storage, study, trial = recorded
    list(profile_trial(storage, trial, study, count=counting([]), require_device=here))
    with create_engine(storage.url).begin() as connection:
        connection.execute(text("""UPDATE profiles SET kernels = '[{"kernel": "k", "us": 1, "counters": [1]}]'"""))
    with pytest.raises(StorageError, match="Profile 1 is damaged"):
        storage.profile(trial.number)


def test_a_table_that_ncu_wrote_on_an_h100_is_read():
    """Of `evoattn profile best` after a search of seed_h100; columns that nobody reads were taken out."""
    (kernel,) = parse((Path(__file__).parent / "ncu_h100.csv").read_text())
    assert (kernel.kernel, kernel.us) == ("flash_wgmma", 12.256)
    stalls = {words: value for words, value in kernel.counters.items() if words.startswith("stalled: ")}
    assert stalls["stalled: wait"] == 2.01 and stalls["stalled: gmma"] == 0.11 and len(stalls) == 15
    assert {words: value for words, value in kernel.counters.items() if words not in stalls} == {
        "SM busy, % of peak": 37.32,
        "tensor cores, % of peak": 49.6,
        "memory busy, % of peak": 25.64,
        "DRAM, % of peak": 0.17,
        "L2, % of peak": 25.11,
        "L2 hits, %": 97.97,
        "occupancy, %": 14.14,
        "instructions per cycle": 1.31,
        "registers per thread": 128.0,
    }
