"""The page in headless Chromium, wide and narrow, light and dark. Debian: apt-get install chromium chromium-driver."""

import json

import pytest

from evoattn.model.records import TrialState
from evoattn.model.space import spelling
from evoattn.report import render_html, summarise
from tests.report.report_studies import add, make_study
from tests.support.browser import chromium

pytestmark = pytest.mark.browser

LONG = "heads_reversed_twice"
COUNTS = {"flash_wgmma": {"tensor cores": 58, "floating point": 460}}
HEIGHTS = {1280: 900, 390: 844}
"""Of the first screen, by width: a laptop, a phone."""


@pytest.fixture(scope="module")
def browser():
    yield from chromium(**{"goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}})


@pytest.fixture(scope="session")
def summaries(timed):
    """By kind of study."""
    storage, study = timed
    estimated, empty = make_study(storage, offline=True, name="estimated"), make_study(storage, name="empty")
    for n in range(40):
        add(
            storage,
            estimated,
            TrialState.ESTIMATED,
            cost=1e5 + n,
            operator="random",
            A=n % 4,
            B=LONG[: 4 + n % 2 * 16],
            C="one",
        )
    studies = {"measured": study, "estimated": estimated, "empty": empty}
    return {kind: summarise(storage, study) for kind, study in studies.items()}


@pytest.fixture(scope="session")
def pages(summaries, tmp_path_factory):
    """Files by kind of study."""
    folder = tmp_path_factory.mktemp("pages")
    for kind, summary in summaries.items():
        (folder / f"{kind}.html").write_text(render_html(summary, count=lambda source, arch: COUNTS))
    return {kind: folder / f"{kind}.html" for kind in summaries}


def show(browser, path, width, scheme):
    """Load the page as it is on a screen of `width` pixels in the colour scheme, with the logs emptied before."""
    size = {"width": width, "height": HEIGHTS[width], "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(path.as_uri())


def requests(browser):
    """Addresses that the page asked for since it was shown, its own among them."""
    events = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", HEIGHTS)
def test_the_page_loads_clean_and_fits(browser, pages, width, scheme):
    path = pages["measured"]
    show(browser, path, width, scheme)
    assert browser.get_log("browser") == []
    assert requests(browser) == [path.as_uri()]
    wide = "return document.documentElement.scrollWidth > document.documentElement.clientWidth"
    assert not browser.execute_script(wide)
    drawn = "return [...document.querySelectorAll('#progress svg, #parallel svg, #slices svg, #lineage svg')].length"
    assert browser.execute_script(drawn) > 4
    box = browser.execute_script("return document.getElementById('config').getBoundingClientRect().toJSON()")
    assert box["top"] >= 0 and box["bottom"] <= HEIGHTS[width]  # the winner's config is on the first screen
    clipped = "return [...document.querySelectorAll('.bars')].filter((t) => t.offsetWidth > t.parentNode.clientWidth)"
    assert browser.execute_script(clipped) == []  # bars are read at a glance or not at all
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(", "))) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60


def test_trials_are_counted_in_whole_numbers(browser, pages):
    show(browser, pages["estimated"], 1280, "light")
    browser.execute_script("for (const row of Object.values(data.progress)) row.length = 4; drawProgress()")
    label = "#progress svg [aria-label='x-axis tick label'] text"
    ticks = browser.execute_script(f'return [...document.querySelectorAll("{label}")].map((text) => text.textContent)')
    assert ticks and not [tick for tick in ticks if "." in tick]


@pytest.mark.parametrize("width", HEIGHTS)
def test_nothing_covers_a_button(browser, pages, width):
    show(browser, pages["measured"], width, "light")
    covered = browser.execute_script("""
        document.querySelectorAll("details").forEach((details) => { details.open = true; });
        return [...document.querySelectorAll("button")].filter((button) => {
          button.scrollIntoView({block: "center", inline: "center"});
          const box = button.getBoundingClientRect();
          const top = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
          return top && top !== button && !button.contains(top);
        }).map((button) => button.textContent)""")
    assert covered == []


@pytest.mark.parametrize("width", HEIGHTS)
@pytest.mark.parametrize("kind", ("estimated", "empty"))
def test_pages_with_less_to_say_load_clean_too(browser, pages, kind, width):
    show(browser, pages[kind], width, "light")
    assert browser.get_log("browser") == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    cut = """return [...document.querySelectorAll("#slices svg text")].filter((label) =>
        label.getBoundingClientRect().left < label.ownerSVGElement.getBoundingClientRect().left - 1)
        .map((label) => label.textContent)"""
    assert browser.execute_script(cut) == []


def test_copying_and_sorting(browser, pages, summaries):
    show(browser, pages["measured"], 1280, "light")
    browser.execute_script("""
        window.copied = [];
        Object.defineProperty(navigator, "clipboard", {value: {writeText: async (text) => { copied.push(text); }}});""")
    for selector in ("[data-copy]", "details#source summary", "[data-copy-from]"):
        browser.execute_script("document.querySelector(arguments[0]).click()", selector)
    config, source = browser.execute_script("return copied")
    winner = summaries["measured"].winner
    assert config.split(" \\\n  ") == [
        f"--family {winner.row.family}",
        *(f"--set {name}={value}" for name, value in winner.settings.items()),
    ]
    assert source == winner.source
    column = """
        const table = document.querySelector("#leaderboard table");
        const heading = [...table.tHead.rows[0].cells].find((cell) => cell.textContent.trim() === "median µs");
        heading.querySelector("button").click();
        const column = [...table.tBodies[0].rows].map((row) => +row.cells[heading.cellIndex].textContent);
        return [heading.ariaSort, column];"""
    direction, up = browser.execute_script(column)
    assert direction == "ascending" and up == sorted(up)
    direction, down = browser.execute_script(column)
    assert direction == "descending" and down == sorted(up, reverse=True) and down != up


def test_a_family_can_be_hidden_and_another_one_chosen(browser, pages):
    show(browser, pages["measured"], 1280, "light")
    count = "return document.querySelectorAll('#progress svg circle').length"
    before = browser.execute_script(count)
    browser.execute_script("document.querySelector('#progress-controls .gap + button').click()")
    assert browser.execute_script(count) < before
    text = "return document.getElementById('parallel').textContent"
    first = browser.execute_script(text)
    browser.execute_script("document.querySelector('#family-controls button:last-child').click()")
    assert browser.execute_script(text) != first
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", HEIGHTS)
def test_a_click_on_a_point_shows_its_trial(browser, pages, summaries, width):
    show(browser, pages["measured"], width, "light")
    webdriver = pytest.importorskip("selenium.webdriver")
    dot = browser.find_elements("css selector", "#progress svg circle")[6]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", dot)
    webdriver.ActionChains(browser).move_to_element(dot).pause(0.1).click().perform()
    said = " ".join(browser.execute_script("return document.getElementById('trial').innerText").split())
    number = int(said.split()[1])
    config = summaries["measured"].progress.configs[number]
    assert all(f"--set {name}={spelling(value)}" in said for name, value in config.items())


@pytest.mark.parametrize("width", HEIGHTS)
def test_the_trial_and_its_time_stay_in_sight(browser, pages, width):
    show(browser, pages["measured"], width, "light")
    seen = browser.execute_script("""
        const table = document.querySelector("table.pinned"), box = table.parentNode;
        box.scrollLeft = box.scrollWidth;
        const edge = box.getBoundingClientRect();
        return [...table.tBodies[0].rows[0].cells].slice(1, 3).map((cell) => {
          const place = cell.getBoundingClientRect();
          return place.left >= edge.left && place.right <= edge.right;
        })""")
    assert seen == [True, True]


def test_contents_lead_to_sections_and_drawings_are_pictures(browser, pages):
    show(browser, pages["measured"], 1280, "light")
    lost = """return [...document.querySelectorAll("nav a")].filter((a) => !document.querySelector(a.hash))
        .map((a) => a.hash)"""
    assert browser.execute_script(lost) == []
    silent = """return [...document.querySelectorAll("figure > svg, #slices svg")].filter((svg) =>
        svg.getAttribute("role") !== "img" || !svg.getAttribute("aria-label")).length"""
    assert browser.execute_script(silent) == 0
