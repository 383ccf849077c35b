"""What a node's page gets: from the real API over the fake engine, behind its keys."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from api.support import JOB, ORDER, Server
from proofserve.api.access import Access, Caller, Role, known_key
from proofserve.api.node_page import NodeHistory, router, snapshot_of, with_dashboard
from proofserve.dashboard.records import STEP_S, ActionOffer, DashboardSnapshot, MemberRow
from proofserve.dashboard.routes import PAGE, SNAPSHOT
from proofserve.rounds.status import CoreLiveness, EngineGauges
from support.pace import until

pytestmark = pytest.mark.anyio


class Watched:
    """A node, its history, and what both show."""

    def __init__(self, **deployed: Any) -> None:
        self.server = Server(**deployed)
        self.cores: tuple[CoreLiveness, ...] = ()
        object.__setattr__(self.server.node, "liveness", lambda: self.cores)
        self.now = 1000.0
        node = self.server.node
        self.history = NodeHistory(node.manager.status, lambda: node.stall, lambda: self.now)

    async def snapshot(self, steps: int = 0) -> DashboardSnapshot:
        """What is shown now, or after so many steps of five seconds."""
        self.history.look()
        for _ in range(steps):
            self.now += STEP_S
            self.history.measure()
        return await snapshot_of(self.server.node, self.history)

    async def member(self, steps: int = 0) -> MemberRow:
        return (await self.snapshot(steps)).members[0]


@asynccontextmanager
async def watched(**deployed: Any) -> AsyncIterator[Watched]:
    made = Watched(**deployed)
    async with made.server.client:
        yield made
    await made.server.node.manager.aclose()


async def perform(server: Server, offer: ActionOffer, **values: Any) -> httpx.Response:
    """Send an action as the page does, its fields filled in."""
    body: dict[str, Any] = msgspec.to_builtins(offer.body) or {}
    for field in offer.fields:
        place = body
        *folders, last = field.name.split(".")
        for folder in folders:
            place = place.setdefault(folder, {})
        value = values.get(field.name, field.value)
        if value not in (None, ""):
            place[last] = value
    path = offer.path.removeprefix("/api/v1/pow")
    return await server.client.request(offer.method, path, json=body if offer.fields else None)


async def test_a_fresh_node_is_idle_and_offers_a_start() -> None:
    async with watched() as node:
        shown = await node.snapshot()
        assert (shown.kind, shown.title, shown.round) == ("node", "toy", None)
        assert (shown.members[0].state, shown.members[0].level.value) == ("idle", "idle")
        (start,) = shown.actions
        refused = await perform(node.server, start)
        assert "block_hash" in refused.text
        answer = await perform(node.server, start, block_hash="0xabc", public_key="key")
        assert answer.status_code == 200, answer.text


async def test_the_form_leaves_the_number_of_values_to_the_scheme_that_is_chosen() -> None:
    async with watched(scheme=None) as node:
        await node.server.post("/init/generate", ORDER)
        await node.server.post("/stop")
        for values in (64, 32):
            (start,) = (await node.snapshot()).actions
            chosen = {} if values == 64 else {"params.k_dim": values}
            await perform(node.server, start, scheme="sketch-v2", **chosen)
            assert (await node.server.status())["config"]["k_dim"] == values
            await node.server.post("/stop")
        # A number that was chosen stays.
        (start,) = (await node.snapshot()).actions
        await perform(node.server, start)
        assert (await node.server.status())["config"]["k_dim"] == 32
        await node.server.post("/stop")


async def test_chat_waits_for_long_forwards_only_while_there_are_any() -> None:
    async with watched() as node:
        seen = await node.server.engine.gauges()

        async def gauges() -> EngineGauges:
            return replace(seen, max_wait_s=0.25, part_s=0.5)

        node.server.engine.gauges = gauges  # type: ignore[method-assign]
        assert (await node.member()).state == "idle"
        await node.server.post("/init/generate", ORDER)
        await until(lambda: len(node.server.outbox.rows) > 20)
        assert (await node.member(3)).state == "chat waits"
        await node.server.post("/stop")
        assert (await node.member()).state == "idle"


async def test_a_round_is_shown_while_it_runs_and_after_it() -> None:
    async with watched() as node:
        await node.server.post("/init/generate", ORDER)
        await until(lambda: len(node.server.outbox.rows) > 20)
        shown = await node.snapshot(3)
        assert shown.round is not None
        assert (shown.members[0].state, shown.round.state) == ("proving", "generating")
        assert shown.round.started_at == 1000.0
        assert [event.text for event in shown.round.events] == ["generating"]
        assert shown.members[0].rate is not None
        assert len(shown.members[0].rate.values) == 3
        (stop,) = shown.actions
        assert (await perform(node.server, stop)).status_code == 200
        ended = await node.snapshot()
        assert ended.round is not None
        assert [event.text for event in ended.round.events] == ["generating", "stopped"]
        assert ended.round.ended_at == 1015.0
        # The next round is offered as the last one was.
        assert (await perform(node.server, ended.actions[0])).status_code == 200
        spec = node.server.node.manager.status().spec
        assert spec is not None
        assert spec.lane is not None
        assert (spec.work.block.hash, spec.lane.node_id) == (ORDER["block_hash"], ORDER["node_id"])


async def test_a_distance_round_can_go_on() -> None:
    body = {key: ORDER[key] for key in ("block_hash", "block_height", "public_key")}
    async with watched() as node:
        order = {**body, "r_target": 2.0, "node_id": 0, "node_count": 1, "seq_len": 16}
        assert (await node.server.post("/init/generate", order)).status_code == 200
        await node.server.post("/stop")
        go_on = (await node.snapshot()).actions[0]
        assert go_on.id == "continue"
        assert (await perform(node.server, go_on)).status_code == 200


async def test_chat_is_named_as_what_holds_proofs_back() -> None:
    async with watched() as node:
        node.server.engine.chat_cores = frozenset({0})
        node.server.engine.deferral_s = 0.001
        await node.server.post("/init/generate", ORDER)
        await node.member(1)
        await until(lambda: len(node.server.engine.calls) > 5)
        member = await node.member(1)
        assert (member.state, member.held_back_by) == ("waits for chat", "chat")
        assert member.level.value == "good"


async def test_what_is_not_well_is_said_with_its_reason() -> None:
    async with watched() as node:
        await node.server.post("/init/generate", ORDER)
        node.server.outbox.full = "no space left on device"
        await until(lambda: node.server.node.manager.status().paused_reason is not None)
        member = await node.member()
        assert member.level.value in ("warning", "bad")
        assert "no space left" in member.reason + member.held_back_by
        shown = await node.snapshot()
        assert shown.round is not None
        assert any("paused" in event.text for event in shown.round.events)
        node.server.outbox.full = None
        await until(lambda: node.server.node.manager.status().paused_reason is None)
        node.cores = (CoreLiveness(0, waited_s=7.0), CoreLiveness(1, waited_s=12.5))
        assert (await node.member()).stalled_s == 12.5
        reason = "engine core 0 has work and has not stepped for 71 s: stopped"
        node.cores = (CoreLiveness(0, waited_s=71.0, stalled=True, reason=reason),)
        member = await node.member()
        assert (member.state, member.reason) == ("engine stalled", reason)
        assert (member.level.value, member.stalled_s) == ("bad", 71.0)
        assert member.held_back_by == "the engine hangs"
        node.cores = ()
        texts = [event.text for event in ((await node.snapshot()).round or shown.round).events]
        assert texts[-2:] == [f"stalled: {reason}", "the engine steps again"]
        node.server.engine.gone = True
        member = await node.member()
        assert (member.state, member.level.value) == ("engine silent", "bad")
        assert "dead" in member.reason


KEYS = [
    known_key("view", Caller("v", Role.VIEWER)),
    known_key("operate", Caller("o", Role.OPERATOR)),
]


@pytest.mark.parametrize(
    ("key", "status"), [(None, 401), ("wrong", 401), ("view", 200), ("operate", 200)]
)
async def test_the_data_need_a_key_and_the_page_does_not(key: str | None, status: int) -> None:
    async with watched(access=Access(KEYS)) as node:
        served = with_dashboard(node.server.node, node.history)
        app = FastAPI()
        app.include_router(router(lambda _: served))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            assert (await client.get(PAGE)).status_code == 200
            assert (await client.get(SNAPSHOT, headers=headers)).status_code == status
            # The node ends, so the stream does.
            await node.server.node.manager.aclose()
            assert (await client.get(f"{PAGE}/events", headers=headers)).status_code == status


async def test_without_the_setting_there_are_no_data() -> None:
    async with watched() as node:
        app = FastAPI()
        app.include_router(router(lambda _: node.server.node))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
            answer = await client.get(SNAPSHOT)
    assert (answer.status_code, "--poc-dashboard" in answer.text) == (503, True)


async def test_jobs_wait_in_the_queue() -> None:
    async with watched() as node:
        await node.server.post("/init/generate", ORDER)
        await node.server.post("/generate", JOB)
        figures = {figure.label: figure for figure in (await node.snapshot()).figures}
        assert (figures["Jobs"].value, figures["Jobs"].of) == (len(JOB["nonces"]), 100)
