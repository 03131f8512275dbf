"""optuna-dashboard's pages of a study, in headless Chromium."""

import threading

import pytest

from evoattn.dashboard.serve import Dashboard, listen
from evoattn.storage import Storage
from tests.report.report_studies import timed_study
from tests.support.browser import chromium

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def browser():
    pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed (evoattn[dashboard])")
    yield from chromium("--window-size=1280,1000")


@pytest.fixture(scope="module")
def address(browser, tmp_path_factory):
    storage = Storage.open(str(tmp_path_factory.mktemp("dashboard") / "db.sqlite"))
    study = timed_study(storage, trials=25)
    server = listen(Dashboard(storage, study), "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/dashboard/studies/0", storage, study
    server.shutdown()
    server.server_close()
    storage.close()


def text_with(browser, part):
    """The page's text, once it says `part`."""
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda b: part in b.find_element("tag name", "body").text)
    return browser.find_element("tag name", "body").text


def test_history_trials_and_a_source_are_on_its_pages(browser, address):
    url, storage, study = address
    browser.get(url)
    assert study.name in text_with(browser, "History")
    browser.get(f"{url}/trials?numbers=0")
    trial = next(iter(storage.iter_trials(study)))
    page = text_with(browser, "Artifacts")
    assert f"trial{trial.number}_{trial.family}.cu" in page and f"{trial.timing.median_us}" in page
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
