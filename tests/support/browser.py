"""A headless Chromium for tests of pages, driven by selenium; tests skip with a reason where either is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""The programs that may be the browser, the first of them that is installed."""
OPTIONS = (
    "--headless",
    "--no-sandbox",  # a container's root has no sandbox
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def find_browser() -> tuple[str, str]:
    """Return the paths of the browser and of its driver; skip the test if one of them, or selenium, is missing."""
    pytest.importorskip("selenium", reason="selenium is not installed: pip install '.[long]'")
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with chromedriver is installed: apt-get install chromium chromium-driver")
    return browser, driver


class Browser:
    """A browser with one page: `run` runs a script in the page, and `errors` are those of its console."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int = 1400, *, dark: bool = False) -> None:
        """Open a file at a width in pixels, in a system with a light or a dark theme."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, motion]})
        self.driver.get(path.resolve().as_uri())

    def run(self, script: str, *values: object) -> Any:
        """Return what a script in the page returns."""
        return self.driver.execute_script(script, *values)

    def find(self, selector: str) -> Any:
        """Return the first element that a selector of CSS fits."""
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector: str) -> list[Any]:
        """Return all elements that a selector of CSS fits."""
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found

    def click(self, element: Any) -> None:
        """Bring an element into view and click it."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def hover(self, element: Any) -> None:
        """Bring an element into view and put the pointer on it."""
        from selenium.webdriver.common.action_chains import ActionChains

        self.run("arguments[0].scrollIntoView({block: 'center', inline: 'center'})", element)
        ActionChains(self.driver).move_to_element(element).perform()

    def press(self, *keys: str) -> None:
        """Press keys, by their names in selenium, such as ARROW_RIGHT, or as characters."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        pressed = ActionChains(self.driver)
        for key in keys:
            pressed = pressed.send_keys(getattr(Keys, key, key))
        pressed.perform()

    @property
    def errors(self) -> list[str]:
        """The messages in the console since the last time."""
        return [str(entry["message"]) for entry in self.driver.get_log("browser")]

    def save_to(self, folder: Path) -> None:
        """Save files that the page offers to a folder."""
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})


@contextmanager
def start_browser(profile: Path) -> Iterator[Browser]:
    """Start a browser with an empty profile folder, and end it after the block."""
    browser, driver = find_browser()
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for option in (*OPTIONS, f"--user-data-dir={profile}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Browser(started)
    finally:
        started.quit()
