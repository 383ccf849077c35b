"""The page of a real controller in a real browser: before and after a member is convicted."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dashboard.looking import expect, is_accessible, live, picture, state
from fleet.servers import ROUND, RunningFleet, fleet_of, members
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import JobFinding, VerdictOutcome
from support.browser import chromium, launched, tab

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.anyio

NAMES = ("rack-1 node-a", "rack-1 node-b", "rack-2 node-a", "rack-2 node-b")
CHEAT = NAMES[2]
# Only operators ask for verdicts: no test proves so many nonces.
POLICY = """
[default]
every_nonces = 100000
nonces = 8
dist_threshold = 0.019
p_mismatch = 0.01
conviction = "cordon"
"""
HONEST = (0.005, 0.007, 0.006, 0.009, 0.008, 0.011, 0.006, 0.007)
FORGED = (0.212, 0.230, 0.221)


def finding(outcome: VerdictOutcome, distances: tuple[float, ...]) -> JobFinding:
    return JobFinding(
        outcome=outcome,
        seconds=1.5,
        reason="E = 1.8e+08" if outcome is VerdictOutcome.FRAUD else "E = 0.19",
        test="paired",
        nonces=len(distances),
        distance=distances[1],
        threshold=0.019,
        distances=distances,
        report={"lines": []},
    )


async def judged(fleet: RunningFleet, folder: Path, name: str, found: JobFinding) -> None:
    """A job about the member, and what a worker finds."""
    id_ = (await fleet.member(name))["id"]
    job = await fleet.call("POST", f"/api/v1/fleet/members/{id_}/verify")
    async with await FleetStore.open(str(folder / "fleet.sqlite")) as store:
        task = await store.verdicts.begin(job["id"], "worker-a")
        assert task is not None
        await store.verdicts.finish(task.job, found)


def healthy(page: "Page") -> None:
    verdicts = page.locator("#member-table tbody .verdict")
    expect(verdicts).to_have_count(len(NAMES))
    for row in range(len(NAMES)):
        expect(verdicts.nth(row)).to_contain_text("honest")
        expect(state(page, row)).to_contain_text("proving")
    is_accessible(page)
    picture(page, "dashboard-fleet")


def convicted(page: "Page") -> None:
    """The convicted member comes first, and its distance is beyond the threshold."""
    first = page.locator("#member-table tbody tr").first
    expect(first).to_contain_text(CHEAT)
    expect(first.locator(".verdict")).to_contain_text("fraud")
    expect(state(page)).to_contain_text("cordoned")
    expect(first.locator("meter")).to_have_attribute(
        "aria-label", "distance 0.23 of the threshold 0.019"
    )
    is_accessible(page)
    picture(page, "dashboard-fleet-convicted")


def look(url: str, check: Callable[["Page"], None]) -> None:
    with launched() as browser, tab(browser, f"{url}/dashboard") as opened:
        live(opened.page)
        check(opened.page)


async def test_a_fleet_before_and_after_a_conviction(tmp_path: Path) -> None:
    chromium()
    (tmp_path / "policy.toml").write_text(POLICY)
    async with (
        members(tmp_path, len(NAMES)) as made,
        fleet_of(tmp_path, [], policy=tmp_path / "policy.toml") as fleet,
    ):
        for member, name in zip(made, NAMES, strict=True):
            body = {"url": member.url, "name": name}
            await fleet.call("POST", "/api/v1/fleet/members", body)
        await fleet.until_ready(len(NAMES))
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(400)
        for name in NAMES:
            await judged(fleet, tmp_path, name, finding(VerdictOutcome.HONEST, HONEST))
        # The servers run in this thread.
        await asyncio.to_thread(look, fleet.url, healthy)
        await judged(fleet, tmp_path, CHEAT, finding(VerdictOutcome.FRAUD, FORGED))
        await asyncio.to_thread(look, fleet.url, convicted)
