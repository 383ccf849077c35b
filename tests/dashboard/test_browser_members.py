"""A thousand members in a real browser: pages, filters, details, and servers in trouble."""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import pytest

from dashboard.looking import expect, expect_unanswered, fits, is_accessible, live, state
from dashboard.serving import HandedIn
from dashboard.snapshots import fleet
from proofserve.dashboard.records import Level
from proofserve.dashboard.routes import SnapshotUnavailable
from support.browser import tab

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MEMBERS = 1000


@pytest.fixture(scope="module")
def handed() -> Iterator[HandedIn]:
    made = HandedIn(fleet(MEMBERS))
    with made.server.running():
        yield made


def address(handed: HandedIn) -> str:
    return f"{handed.server.url}/dashboard"


def test_a_thousand_members_come_in_pages_the_worst_first(
    browser: "Browser", handed: HandedIn
) -> None:
    with tab(browser, address(handed)) as opened:
        page = opened.page
        live(page)
        rows = page.locator("#member-table tbody tr")
        expect(rows).to_have_count(25)
        expect(state(page)).to_contain_text("cordoned")
        pager = page.locator("#pager")
        expect(pager).to_contain_text("Page 1 of 40")
        first = rows.first.locator(".name").inner_text()
        following = pager.get_by_role("button", name="Next")
        following.focus()
        page.keyboard.press("Enter")
        expect(pager).to_contain_text("Page 2 of 40")
        # Whoever reads on by keyboard is still at the button.
        expect(page.locator(":focus")).to_have_text("Next")
        assert rows.first.locator(".name").inner_text() != first
        page.get_by_role("button", name="needs action").click()
        expect(pager).to_be_hidden()
        expect(rows).to_have_count(20)
        page.get_by_role("searchbox", name="Search members").fill("4 bits 0031")
        expect(rows).to_have_count(1)
        expect(rows.locator(".verdict")).to_contain_text("fraud")
        expect(rows.locator("meter")).to_have_attribute(
            "aria-label", "distance 0.041 of the threshold 0.026"
        )
        page.get_by_role("searchbox").fill("no such member")
        expect(page.locator("#member-table")).to_contain_text("No member fits the filter")
        is_accessible(page)


def test_all_panels_of_a_fleet_are_shown(browser: "Browser", handed: HandedIn) -> None:
    with tab(browser, address(handed)) as opened:
        page = opened.page
        live(page)
        for panel in ("#round", "#distances", "#jobs"):
            expect(page.locator(panel)).to_be_visible()
        for panel in ("#load", "#waits", "#keys"):
            expect(page.locator(panel)).to_be_hidden()
        label = page.locator("#distances .chart").get_attribute("aria-label")
        assert "beyond the threshold 0.026" in (label or "")
        is_accessible(page)
        page.set_viewport_size({"width": 360, "height": 740})
        fits(page)
        page.set_viewport_size({"width": 1024, "height": 740})
        fits(page)


def test_details_of_a_member_stay_current(browser: "Browser", handed: HandedIn) -> None:
    before = handed.snapshot
    with tab(browser, address(handed)) as opened:
        page = opened.page
        live(page)
        page.locator("#member-table .name").first.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Last verdict: fraud")
        is_accessible(page)
        name = dialog.locator("h2").inner_text()
        well = msgspec.structs.replace
        handed.snapshot = well(
            before,
            members=tuple(
                well(member, state="back", level=Level.BAD) if member.name == name else member
                for member in before.members
            ),
        )
        expect(dialog.locator(".badge")).to_contain_text("back")
        expect(page.locator("#live")).to_have_text(f"{name}: back")
        # An action of a member has its reason to fill in.
        dialog.get_by_role("button", name="Cordon").click()
        expect(page.locator("#action-dialog")).to_contain_text(name)
        expect(page.get_by_label("Reason")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#action-dialog")).to_be_visible()
    handed.snapshot = before


def test_a_server_in_trouble_says_which(browser: "Browser", handed: HandedIn) -> None:
    with tab(browser, address(handed)) as opened:
        page = opened.page
        live(page)
        handed.error = SnapshotUnavailable("the database does not answer")
        expect(page.locator("#banner")).to_contain_text("the database does not answer")
        expect(page.locator("#connection-text")).to_have_text("Server in trouble")
        handed.error = None
        live(page)
        # A reading that takes long is no lost connection, and what is shown is called old.
        handed.held = True
        expect(page.locator("#connection-text")).to_have_text("Live, but late")
        handed.held = False
        live(page)


def test_without_a_free_stream_the_page_asks_again_and_again(browser: "Browser") -> None:
    handed = HandedIn(fleet(3), most_streams=0)
    with handed.server.running(), tab(browser, address(handed)) as opened:
        page = opened.page
        expect(page.locator("#connection-text")).to_have_text("Asks every 5 s")
        expect(page.locator("#members-title")).to_have_text("Members")
        handed.snapshot = msgspec.structs.replace(handed.snapshot, title="Renamed")
        expect(page.locator("h1")).to_have_text("Renamed", timeout=10_000)
        expect_unanswered(opened)


def test_text_of_a_member_is_never_a_script(browser: "Browser") -> None:
    text = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    snapshot = fleet(1)
    member = msgspec.structs.replace(snapshot.members[0], name=text, reason=text, model=text)
    handed = HandedIn(msgspec.structs.replace(snapshot, title=text, members=(member,)))
    with handed.server.running(), tab(browser, address(handed)) as opened:
        page = opened.page
        live(page)
        expect(page.locator("h1")).to_have_text(text)
        expect(page.locator(".name")).to_have_text(text)
        assert page.evaluate("window.hit") is None
        assert page.locator("img").count() == 0


def test_the_time_of_a_snapshot_over_http(browser: "Browser", handed: HandedIn) -> None:
    """No limit is asserted: the figure is for docs/dashboard.md."""
    with tab(browser, address(handed)) as opened:
        live(opened.page)
        taken = []
        for _ in range(20):
            handed.feed._latest = None
            began = time.perf_counter()
            answer = opened.context.request.get(f"{handed.server.url}/dashboard/snapshot?limit=100")
            taken.append(time.perf_counter() - began)
        assert answer.ok
        taken.sort()
        size = len(answer.body())
        print(
            f"{MEMBERS} members: {taken[10] * 1e3:.0f} ms, at most {taken[-1] * 1e3:.0f}, {size} B"
        )
