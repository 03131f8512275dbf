"""Chromium for tests of pages."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


def chromium(*arguments: str, **capabilities: Any) -> Iterator[Any]:
    """A browser without a window, closed at last; skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs Selenium (pip install '.[test]')")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Chromium and its driver (apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    for name, value in capabilities.items():
        options.set_capability(name, value)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()
