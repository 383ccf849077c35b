"""What the API shows of an engine core that hangs, whether the engine answers or not."""

import asyncio
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from api.support import STATUS, Server, serving
from proofserve.api import routes
from proofserve.api.access import Access, Caller, Role, known_key
from proofserve.api.metrics import exposed
from proofserve.rounds.errors import EngineFault, EngineGone
from proofserve.rounds.status import CoreLiveness, EngineGauges
from rounds.doubles import QUICK

pytestmark = pytest.mark.anyio

READY = "/health/ready"
REASON = "engine core 1 (process 12) has work and has not stepped for 63 s: it uses no time"
IDLE = CoreLiveness(0, steps=7)
HANGS = CoreLiveness(1, doing="chat", steps=9, waited_s=63.2, stalled=True, reason=REASON)
BUSY = CoreLiveness(1, doing="chat", steps=9, waited_s=95.0)
UNWATCHED = CoreLiveness(1, watched=False)


class Cores:
    """What the watch saw last; a test changes it."""

    def __init__(self, *seen: CoreLiveness) -> None:
        self.seen = seen

    def __call__(self) -> tuple[CoreLiveness, ...]:
        return self.seen


def silence(server: Server, seconds: float = 30.0) -> None:
    """Let the engine not answer, as a core does that hangs or runs a long step."""

    async def gauges() -> EngineGauges:
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.005)
            if server.engine.gone:
                raise EngineGone("the toy engine has died while it was asked")
        raise EngineFault("the toy engine was silent")

    server.engine.gauges = gauges  # type: ignore[method-assign]


async def test_a_core_that_hangs_is_not_ready_and_named_with_its_seconds() -> None:
    cores = Cores(IDLE, HANGS)
    async with serving(liveness=cores) as server:
        silence(server)
        async with asyncio.timeout(2):
            response = await server.get(READY)
        assert response.status_code == 503
        assert response.json()["detail"] == {"engine": REASON, "outbox": "ok"}
        del server.engine.gauges  # type: ignore[attr-defined]
        cores.seen = (IDLE, BUSY)
        assert (await server.get(READY)).status_code == 200


async def test_a_client_without_a_key_learns_that_the_engine_failed_alone() -> None:
    access = Access([known_key("secret", Caller("operator", Role.OPERATOR))])
    async with serving(liveness=Cores(HANGS), access=access) as server:
        response = await server.get(READY)
        assert response.status_code == 503
        assert response.json()["detail"]["engine"] == "failed"


async def test_a_hang_that_begins_while_the_engine_is_asked_is_seen_at_once() -> None:
    cores = Cores(IDLE, BUSY)
    async with serving(liveness=cores) as server:
        silence(server)
        asking = asyncio.create_task(server.get(STATUS))
        await asyncio.sleep(0.05)
        cores.seen = (IDLE, HANGS)
        async with asyncio.timeout(2):
            body = (await asking).json()
        assert (body["engine"], body["engine_error"]) == (None, REASON)
        assert [core["stalled"] for core in body["liveness"]] == [False, True]
        assert body["liveness"][1]["waited_s"] == 63.2


async def test_a_busy_engine_that_does_not_answer_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "BUSY_ANSWER_S", 0.1)
    async with serving(liveness=Cores(IDLE, BUSY)) as server:
        silence(server)
        assert (await server.get(READY)).status_code == 200
        server.engine.gone = True
        del server.engine.gauges  # type: ignore[attr-defined]
        assert (await server.get(READY)).status_code == 503


@pytest.mark.parametrize("liveness", [Cores(IDLE, BUSY), Cores()])
async def test_a_busy_engine_shows_its_newest_values_and_their_age(liveness: Cores) -> None:
    async with serving(liveness=liveness) as server:
        assert (await server.get(STATUS)).json()["engine"]["age_s"] == 0
        silence(server)
        async with asyncio.timeout(2):
            body = (await server.get(STATUS)).json()
            text = (await server.get("/metrics")).text
            assert (await server.get(READY)).status_code == 200
        assert body["engine_error"] is None
        assert body["engine"]["age_s"] > 0
        assert 'proofserve_up{part="engine"} 1.0' in text
        assert "proofserve_engine_age_seconds 0.0" not in text


async def test_an_engine_that_nobody_watches_may_not_be_busy_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routes, "UNWATCHED_S", 0.05)
    async with serving(liveness=Cores()) as server:
        assert (await server.get(READY)).status_code == 200
        silence(server)
        response = await server.get(READY)
        assert response.status_code == 503
        assert "nothing watches it" in response.json()["detail"]["engine"]


async def test_an_engine_that_nobody_watches_must_answer() -> None:
    for liveness in (Cores(), Cores(IDLE, UNWATCHED)):
        async with serving(replace(QUICK, engine_answer_s=30), liveness=liveness) as server:
            silence(server, 0.01)
            response = await server.get(READY)
            assert response.status_code == 503
            assert response.json()["detail"]["engine"] == "the toy engine was silent"


async def test_the_metrics_of_a_core_that_hangs_need_no_answer_of_it() -> None:
    registry = CollectorRegistry()
    async with serving(liveness=Cores(IDLE, HANGS)) as server:
        silence(server)
        with exposed(server.node, registry):
            text = (await asyncio.to_thread(generate_latest, registry)).decode()
    assert 'proofserve_core_step_age_seconds{core="0"} 0.0' in text
    assert 'proofserve_core_step_age_seconds{core="1"} 63.2' in text
    assert 'proofserve_core_stalled{core="1"} 1.0' in text
    assert 'proofserve_up{part="engine"} 0.0' in text
