"""The health checks, and their answers for each fault."""

import asyncio

import pytest

from api.support import ORDER, START, Server, serving
from proofserve.rounds.computation import NONCES
from support.pace import until

pytestmark = pytest.mark.anyio

LIVE, READY, DEEP, ENGINE = (f"/health/{name}" for name in ("live", "ready", "deep", "engine"))


async def test_a_healthy_node_passes_all_checks(server: Server) -> None:
    for path in (LIVE, READY, ENGINE):
        response = await server.get(path)
        assert (response.status_code, response.json()) == (200, {"status": "ok"})
    deep = await server.get(DEEP)
    assert deep.status_code == 200
    assert deep.json()["status"] == "ok"
    assert deep.json()["seconds"] >= server.engine.latency_s
    assert server.engine.calls == [NONCES]


async def test_a_node_without_proofs_is_alive_and_not_ready() -> None:
    async with serving(enabled=False) as server:
        assert (await server.get(LIVE)).status_code == 200
        for path in (READY, DEEP, ENGINE):
            response = await server.get(path)
            assert (response.status_code, response.json()) == (503, {"detail": "PoC not enabled"})


async def test_a_dead_engine_is_named(server: Server) -> None:
    server.engine.gone = True
    assert (await server.get(LIVE)).status_code == 200
    response = await server.get(READY)
    assert response.status_code == 503
    assert response.json()["detail"] == {"engine": "the toy engine is dead", "outbox": "ok"}
    response = await server.get(ENGINE)
    assert response.status_code == 503
    assert response.json()["detail"] == {"engine": "the toy engine is dead"}
    assert (await server.get(DEEP)).status_code == 503


async def test_an_outbox_that_cannot_write_is_named(server: Server) -> None:
    server.outbox.full = "no disk"
    response = await server.get(READY)
    assert response.status_code == 503
    assert response.json()["detail"] == {"engine": "ok", "outbox": "no disk"}
    # No restart would make room on the disk.
    assert (await server.get(ENGINE)).status_code == 200
    server.outbox.full = None
    assert (await server.get(READY)).status_code == 200


async def test_an_outbox_that_hangs_is_named(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proofserve.api.node.OUTBOX_ANSWER_S", 0.05)
    server.outbox.latency_s = 30.0
    response = await server.get(READY)
    assert response.json()["detail"]["outbox"] == "the outbox did not answer within 0.05 s"


async def test_chat_has_priority_over_the_deep_check(server: Server) -> None:
    server.engine.deferrals = 1
    response = await server.get(DEEP)
    assert response.status_code == 503
    assert response.json()["detail"].startswith("chat is busy: ")
    assert (await server.get(DEEP)).status_code == 200


@pytest.mark.parametrize("what", ["fault", "not finite"])
async def test_a_forward_that_fails_is_not_healthy(server: Server, what: str) -> None:
    if what == "fault":
        server.engine.faults = 1
    else:
        server.engine.not_finite = frozenset(NONCES)
    response = await server.get(DEEP)
    assert response.status_code == 503
    assert ("told to fail" if what == "fault" else "not finite") in response.json()["detail"]


async def test_deep_checks_take_turns_and_a_round_goes_on(server: Server) -> None:
    await server.post(START, ORDER)
    answers = await asyncio.gather(*(server.get(DEEP) for _ in range(3)))
    assert [answer.status_code for answer in answers] == [200] * 3
    assert server.engine.leases <= 2
    stored = len(server.outbox.rows)
    await until(lambda: len(server.outbox.rows) > stored)


async def test_a_node_that_shuts_down_is_not_ready_and_starts_nothing(server: Server) -> None:
    await server.node.manager.aclose()
    assert (await server.get(LIVE)).status_code == 200
    for response in (await server.get(READY), await server.get(DEEP)):
        assert response.status_code == 503
        assert "shutting down" in response.json()["detail"]
    assert (await server.post(START, ORDER)).status_code == 503
    assert server.engine.calls == []
