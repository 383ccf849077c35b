"""What the page of a fleet gets, and what it may order."""

from pathlib import Path

import msgspec
import pytest

from fleet.servers import ROUND, RunningFleet, fleet_of, members
from proofserve.dashboard.records import ActionOffer, DashboardSnapshot, Level, MemberRow
from support.pace import until

pytestmark = pytest.mark.anyio


async def page_of(fleet: RunningFleet, query: str = "") -> DashboardSnapshot:
    response = await fleet.http.get(f"/dashboard/snapshot{query}")
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=DashboardSnapshot)


async def order(fleet: RunningFleet, action: ActionOffer, **fields: str) -> None:
    body = {**(action.body or {}), **fields}
    await fleet.call(action.method, action.path, body or None)


def row(page: DashboardSnapshot, url: str) -> MemberRow:
    return next(each for each in page.members if each.name == url.removeprefix("http://"))


async def test_the_page_shows_members_and_round_and_offers_what_fits(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made, fleet_of(tmp_path, made) as fleet:
        html = await fleet.http.get("/dashboard")
        idle = await page_of(fleet)
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(20)
        await made[2].kill()
        await until(lambda: is_bad(fleet, made[2].url))
        running = await page_of(fleet)
        searched = await page_of(fleet, f"?search={made[0].serving.port}&limit=1")
        cordon = next(e for e in row(running, made[0].url).actions if e.id == "cordon")
        await order(fleet, cordon, reason="a new driver")
        cordoned = row(await page_of_fresh(fleet), made[0].url)
        await order(fleet, next(e for e in cordoned.actions if e.id == "uncordon"))
        (stop,) = running.actions
        await order(fleet, stop)
        stopped = await fleet.status()
    assert html.status_code == 200
    assert (idle.kind, idle.title, idle.round) == ("fleet", "Fleet of toy", None)
    assert {each.state for each in idle.members} == {"ready"}
    assert [each.id for each in idle.actions] == ["start"]
    assert running.members[0].level is Level.BAD
    assert "no answer" in running.members[0].reason
    proving = row(running, made[0].url)
    assert (proving.state, proving.level) == ("proving", Level.GOOD)
    assert {fact.label: fact.value for fact in proving.facts}["Lane of the round"] in (
        "0",
        "1",
        "2",
    )
    assert running.round is not None
    assert running.round.state == "generating"
    figures = {each.label: each for each in running.figures}
    assert (figures["Members ready"].value, figures["Members ready"].of) == (2, 3)
    assert (figures["Lanes given"].value, figures["Lanes given"].of) == (3, 8)
    assert [each.name for each in searched.members] == [proving.name]
    assert (cordoned.state, cordoned.reason) == ("cordoned", "a new driver")
    assert stopped["status"] == "STOPPED"


async def is_bad(fleet: RunningFleet, url: str) -> bool:
    return row(await page_of(fleet), url).level is Level.BAD


async def page_of_fresh(fleet: RunningFleet) -> DashboardSnapshot:
    """A page that was read after this call; a reading serves for two seconds."""
    before = (await page_of(fleet)).at

    async def renewed() -> bool:
        return (await page_of(fleet)).at > before

    await until(renewed)
    return await page_of(fleet)


async def test_the_page_needs_a_key_and_its_files_none(tmp_path: Path) -> None:
    fleet = RunningFleet(tmp_path, [], api_key="operator", viewer_key="viewer")
    await fleet.start()
    try:
        html = await fleet.http.get("/dashboard")
        without = await fleet.http.get("/dashboard/snapshot")
        viewer = {"Authorization": "Bearer viewer"}
        empty = await fleet.http.get("/dashboard/snapshot", headers=viewer)
    finally:
        await fleet.kill()
        await fleet.http.aclose()
    assert html.status_code == 200
    assert without.status_code == 401
    page = msgspec.json.decode(empty.content, type=DashboardSnapshot)
    assert page.members == page.actions == ()
    assert "the fleet has no member" in page.note
