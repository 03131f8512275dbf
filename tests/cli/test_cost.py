"""`evoattn cost fit` and `judge`, on a few made-up times."""

import pytest

from evoattn.cost.fitted import load
from tests.cli.terminal import refused, run
from tests.cost.made_up_campaigns import CONFIGS, kept_campaigns


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return kept_campaigns(tmp_path_factory.mktemp("kept"))


def test_a_fit_is_written_and_says_what_it_was_made_from(kept, tmp_path):
    result = run("cost", "fit", *kept, "--unjudged", "--each", 9, "--jobs", 1, "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    made = load(tmp_path / "mine").about
    assert made["files"] == ["h100-x", "h200-x"] and made["cards"] == ["h100", "h200"] and not made["left_out"]
    assert result.stdout.splitlines()[0] == f"{13 * 9} times in the fit" and made["times"] == 13 * 9


@pytest.mark.slow
def test_a_fit_says_how_it_was_judged(kept, tmp_path):
    result = run("cost", "fit", *kept, "--jobs", 2, "-o", tmp_path / "mine.npz")
    assert result.exit_code == 0, result.output
    made = load(tmp_path / "mine.npz").about["left_out"]
    assert {"all", "campaign, h100", "campaign, h200", "flash_mma"} <= set(made)
    assert made["all"]["kernels"] == 13 * len(CONFIGS)
    assert f"| all | 13 | {13 * len(CONFIGS)} | {made['all']['spearman']:.3f} |" in result.stdout


@pytest.mark.slow
def test_a_judgement_is_tables_and_writes_nothing(kept):
    shipped = load().about
    result = run("cost", "judge", *kept, "--judged", 25, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert "Problems left out of the fit:" in result.stdout
    assert load.__wrapped__().about == shipped


@pytest.mark.slow
def test_words_that_cannot_be_are_refused(kept, tmp_path):
    one = kept[0]
    refused(run("cost", "fit", one, "--again"), 2, "not both")
    refused(run("cost", "fit", "--near"), 2, "has not seen")
    refused(run("cost", "fit", tmp_path / "none.jsonl.gz", "-o", tmp_path / "fit"), 2, "none.jsonl.gz")
    refused(run("cost", "judge", one.with_name("none")), 2, "none")
