"""The page of a node in a real browser: live, lost and back, keys, keyboard, phone."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from dashboard.looking import expect, expect_unanswered, fits, is_accessible, live, picture, state
from dashboard.serving import ServedNode
from proofserve.dashboard.records import Level, TimelineEvent
from proofserve.rounds.state import State
from proofserve.rounds.status import CoreLiveness
from support.browser import tab
from support.pace import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VIEWER, OPERATOR = "viewer-key", "operator-key"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedNode]:
    made = ServedNode(tmp_path_factory.mktemp("node"))
    with made.server.running():
        yield made


@pytest.fixture
def node(served: ServedNode) -> Iterator[ServedNode]:
    """The same node for every test, well and without a round."""
    yield served
    served.engine.hangs, served.cores = False, (CoreLiveness(0),)
    served.call("/stop")


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[ServedNode]:
    """A node with keys, and a round that runs."""
    keys = {"api_key": (SecretStr(OPERATOR),), "viewer_key": (SecretStr(VIEWER),)}
    served = ServedNode(tmp_path, **keys)
    with served.server.running():
        served.start_round(OPERATOR)
        yield served


def address(node: ServedNode) -> str:
    return f"{node.server.url}/dashboard"


def give_past(node: ServedNode, minutes: int, slow: range = range(0)) -> None:
    """Half an hour of service in a moment: the past of the charts is made up, the rest is real."""
    draw, history = Random(1), node.history
    stats = history.look().stats
    assert stats is not None
    for step in range(minutes * 12):
        part = 0.0 if step in slow else draw.uniform(0.93, 1.05)
        history._rate.add(stats.recent_nonces_per_second * part)
    now = history._clock()
    history.started_at, history.rate_until = now - minutes * 60, now
    events = [(0, "generating", Level.GOOD)]
    if slow and slow.stop < minutes * 12:
        paused = "paused: outbox: database or disk is full"
        events += [(slow.start, paused, Level.WARNING), (slow.stop, "goes on", Level.GOOD)]
    history.events = deque(
        TimelineEvent(at=history.started_at + step * 5, text=text, level=level)
        for step, text, level in events
    )


def mark(page: "Page") -> None:
    """A reload of the page would lose this."""
    page.evaluate("window.marked = true")


def was_not_reloaded(page: "Page") -> bool:
    return bool(page.evaluate("window.marked === true"))


def test_a_node_is_shown_live(browser: "Browser", node: ServedNode) -> None:
    with tab(browser, address(node)) as opened:
        page = opened.page
        live(page)
        mark(page)
        expect(page.locator("h1")).to_have_text("Qwen/Qwen3-32B")
        expect(state(page)).to_contain_text("idle")
        node.start_round()
        expect(state(page)).to_contain_text("proving")
        expect(page.locator("#live")).to_contain_text("this node: proving")
        proved = page.locator(".figure", has_text="Proved in this round").locator("b")
        before = proved.inner_text()
        expect(proved).not_to_have_text(before)
        wait_until(lambda: node.processed > 1000)
        give_past(node, 25, slow=range(120, 134))
        expect(page.locator("#round .events li")).to_have_count(3)
        expect(page.locator("#round canvas")).to_be_visible()
        is_accessible(page)
        picture(page, "dashboard-node")
        assert was_not_reloaded(page)


def test_a_stalled_engine_is_seen_at_once(browser: "Browser", node: ServedNode) -> None:
    node.start_round()
    with tab(browser, address(node), color_scheme="dark") as opened:
        page = opened.page
        live(page)
        wait_until(lambda: node.processed > 500)
        give_past(node, 18, slow=range(198, 216))
        reason = (
            "engine core 0 has had work and made no step for 94 s, and its processes use no"
            " processor time"
        )
        node.engine.hangs = True
        node.cores = (CoreLiveness(0, doing="chat", waited_s=94.0, stalled=True, reason=reason),)
        expect(state(page)).to_contain_text("engine stalled")
        expect(page.locator("#member-table .reason")).to_have_text(reason)
        expect(page.locator("#round .events li").first).to_contain_text("stalled")
        expect(page.locator("td[data-label='Since last step'] span")).to_have_class("bad")
        is_accessible(page)
        picture(page, "dashboard-node-stalled")


def test_a_lost_connection_is_said_and_comes_back(browser: "Browser", tmp_path: Path) -> None:
    node = ServedNode(tmp_path)
    node.server.start()
    with tab(browser, address(node)) as opened:
        page = opened.page
        live(page)
        mark(page)
        node.server.stop()
        expect(page.locator("#connection-text")).to_have_text("Connection lost")
        expect(page.locator("#banner")).to_contain_text("What you see is")
        expect(page.locator("#live")).to_contain_text("Connection lost")
        # What was known stays in view.
        expect(state(page)).to_be_visible()
        node.server.start()
        live(page)
        expect(page.locator("#banner")).to_be_hidden()
        assert was_not_reloaded(page)
        expect_unanswered(opened)
    # The stream of the page that was open a moment ago does not hold up the end.
    assert node.server.stop() < 3.0


def test_a_key_shows_and_only_an_operators_stops(browser: "Browser", guarded: ServedNode) -> None:
    assert guarded.node is not None
    manager = guarded.node.manager
    with tab(browser, address(guarded)) as opened:
        page = opened.page
        key = page.get_by_role("textbox", name="Key")
        expect(page.get_by_role("dialog")).to_contain_text("this server needs a key")
        is_accessible(page)
        key.fill("wrong")
        page.get_by_role("button", name="Use key").click()
        expect(page.get_by_role("dialog")).to_contain_text("this server needs a key")
        expect(page.locator("#connection-text")).to_have_text("No access")
        key.fill(VIEWER)
        key.press("Enter")
        live(page)
        stop = page.locator("#round").get_by_role("button", name="Stop round")
        stop.click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("queued jobs are cancelled")
        dialog.get_by_role("button", name="Cancel").click()
        assert manager.status().state is State.GENERATING
        stop.click()
        dialog.get_by_role("button", name="Stop round").click()
        expect(dialog.get_by_role("alert")).to_contain_text("needs an operator's")
        assert manager.status().state is State.GENERATING
        dialog.get_by_label("Operator's key").fill(OPERATOR)
        dialog.get_by_role("button", name="Stop round").click()
        expect(dialog).to_be_hidden()
        assert manager.status().state is State.STOPPED
        expect(page.locator("#round .badge").first).to_contain_text("stopped")
        # The key lives as long as the tab: a reload needs none, another tab does.
        page.reload()
        live(page)
        expect_unanswered(opened)
    with tab(browser, address(guarded)) as other:
        expect(other.page.get_by_role("dialog")).to_be_visible()
        expect_unanswered(other)


def test_everything_works_by_keyboard(browser: "Browser", node: ServedNode) -> None:
    assert node.node is not None
    with tab(browser, address(node)) as opened:
        page = opened.page
        live(page)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "members"
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("this node")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid"
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("Digest of the weights")
        page.keyboard.press("Escape")
        expect(page.locator(":focus")).to_have_text("this node")
        page.keyboard.press("Tab")
        expect(page.locator(":focus")).to_have_text("Start round")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog")
        for text in ("0xabc", "7", "my-key"):
            page.keyboard.press("ControlOrMeta+a")
            page.keyboard.type(text)
            page.keyboard.press("Tab")
        is_accessible(page)
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        spec = node.node.manager.status().spec
        assert spec is not None
        assert (spec.work.block.hash, spec.work.block.height) == ("0xabc", 7)
        assert spec.work.public_key == "my-key"
        stop = page.get_by_role("button", name="Stop round")
        stop.focus()
        page.keyboard.press("Enter")
        # Enter twice does not stop a round.
        expect(page.locator(":focus")).to_have_text("Cancel")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        wait_until(
            lambda: node.node is not None and node.node.manager.status().state is State.STOPPED
        )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(
    browser: "Browser", node: ServedNode, scheme: str
) -> None:
    node.start_round()
    with tab(browser, address(node), width=360, height=740, color_scheme=scheme) as opened:
        page = opened.page
        live(page)
        expect(page.locator("#round")).to_be_visible()
        fits(page)
        is_accessible(page)
        ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) is (scheme == "dark")
