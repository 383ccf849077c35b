"""What the tests of the page share: waiting for texts, checks of a whole page, screenshots."""

import io
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from support.browser import Tab

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# The browser writes to the console whenever a request fails, whether the page expects that or not.
UNANSWERED = re.compile(r"Failed to load resource: (net::ERR_|the server responded with a status)")
_CHECK = (Path(__file__).parent / "a11y.js").read_text()
_MOST_BYTES = 150_000


def expect(locator: "Locator") -> Any:
    from playwright.sync_api import expect as expected

    # The default of five seconds is short for a busy machine.
    expected.set_options(timeout=30_000)
    return expected(locator)


def live(page: "Page") -> None:
    """Wait until the page is connected and shows something."""
    expect(page.locator("#connection-text")).to_have_text("Live")
    expect(page.locator("#members")).to_be_visible()


def state(page: "Page", row: int = 0) -> "Locator":
    return page.locator("#member-table tbody tr").nth(row).locator(".badge").first


def is_accessible(page: "Page") -> None:
    assert page.evaluate(_CHECK) == []


def fits(page: "Page") -> None:
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def expect_unanswered(tab: Tab) -> None:
    """Forget that requests failed, as the test made them; anything else stays a fault."""
    tab.faults[:] = [fault for fault in tab.faults if not UNANSWERED.match(fault)]


def picture(page: "Page", name: str) -> None:
    """Take a screenshot of the whole page; `make pictures` keeps it in the documents."""
    page.mouse.move(0, 0)
    image = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    # A calm page has few colours, and the file stays small without the others.
    palette = Image.Quantize.MAXCOVERAGE
    data = io.BytesIO()
    image.quantize(256, palette, kmeans=2, dither=Image.Dither.NONE).save(
        data, "PNG", optimize=True
    )
    assert len(data.getvalue()) < _MOST_BYTES
    if folder := os.environ.get("PICTURES"):
        (Path(folder) / f"{name}.png").write_bytes(data.getvalue())
