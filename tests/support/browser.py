"""A real browser: the system's Chromium, and pages that notice what a person would not."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Tests may run as root, for whom Chromium has no sandbox; the only pages are ours.
OPTIONS = ["--no-sandbox", "--disable-dev-shm-usage", "--force-color-profile=srgb"]
# Reports what the policy of the page's server has blocked.
_REPORT = """
window.violations = [];
document.addEventListener("securitypolicyviolation",
  (event) => window.violations.push(`${event.violatedDirective}: ${event.blockedURI}`));
"""


def chromium() -> str:
    """The path of a browser. Skips the test where this machine has none."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("no Chromium on this machine: `make browser` installs it")
    return path


@contextmanager
def launched() -> Iterator["Browser"]:
    path = chromium()
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A tab in a window of its own. ``faults`` has errors of scripts and of the console."""

    def __init__(
        self, browser: "Browser", width: int = 1280, height: int = 900, **more: Any
    ) -> None:
        size = {"width": width, "height": height}
        self.context = browser.new_context(viewport=size, **more)
        self.context.set_default_timeout(15_000)
        self.context.add_init_script(_REPORT)
        self.page: Page = self.context.new_page()
        self.faults: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._heard)

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(message.text)

    def violations(self) -> list[str]:
        return list(self.page.evaluate("window.violations"))

    def close(self) -> None:
        self.context.close()


@contextmanager
def tab(browser: "Browser", address: str, **options: Any) -> Iterator[Tab]:
    """A tab at ``address``. At its end, assert that nothing was blocked and no script failed."""
    opened = Tab(browser, **options)
    try:
        opened.page.goto(address)
        yield opened
        assert opened.violations() == []
        assert opened.faults == []
    finally:
        opened.close()
