"""The metrics of a scrape, read from another thread as servers do."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from api.distance_bodies import CLAIMS, ROUND
from api.support import GENERATE, JOB, ORDER, START, STOP, Server
from proofserve.api.metrics import exposed, read_from_thread
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.rounds.status import FORWARD_BOUNDS_S
from support.pace import until

pytestmark = pytest.mark.anyio

Samples = dict[tuple[str, str], float]


@pytest.fixture
async def registry(server: Server) -> AsyncIterator[CollectorRegistry]:
    made = CollectorRegistry()
    with exposed(server.node, made):
        yield made


async def scrape(registry: CollectorRegistry) -> Samples:
    """Values by one string of the name and the labels, which are sorted by name."""
    text = (await asyncio.to_thread(generate_latest, registry)).decode()
    return {
        (sample.name.removeprefix("proofserve_"), ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_a_fresh_node_shows_zeros(registry: CollectorRegistry) -> None:
    seen = await scrape(registry)
    assert seen["nonces_total", "proved,round"] == 0
    assert seen["validations_total", "fraud"] == 0
    assert seen["callback_failures_total", ""] == 0
    assert (seen["round_state", "IDLE"], seen["round_state", "GENERATING"]) == (1, 0)
    assert (seen["up", "engine"], seen["up", "outbox"]) == (1, 1)


async def test_a_task_that_never_ends_is_shown(registry: CollectorRegistry) -> None:
    before = (await scrape(registry))["tasks", ""]
    leaked = asyncio.create_task(asyncio.Event().wait())
    assert (await scrape(registry))["tasks", ""] == before + 1
    leaked.cancel()


async def test_the_count_of_nonces_continues_over_rounds_and_jobs(
    server: Server, registry: CollectorRegistry
) -> None:
    server.engine.not_finite = frozenset({4})
    for _ in range(2):
        enough = len(server.outbox.rows) + 20
        await server.post(START, ORDER)
        await until(lambda enough=enough: len(server.outbox.rows) > enough)
        running = await scrape(registry)
        assert running["round_state", "GENERATING"] == 1
        assert running["nonces_per_second", ""] > 0
        await server.post(STOP)
    await server.post(GENERATE, {**JOB, "wait": True})
    seen = await scrape(registry)
    assert seen["nonces_per_second", ""] == 0
    counted = [seen["nonces_total", f"{outcome},round"] for outcome in ("proved", "failed")]
    assert counted == [len(server.outbox.rows) - 2, 2]
    assert seen["nonces_total", "proved,job"] == len(JOB["nonces"]) - 1
    assert seen["nonces_total", "failed,job"] == 1


async def test_validations_count_by_verdict(server: Server, registry: CollectorRegistry) -> None:
    proved = (await server.post(GENERATE, {**JOB, "wait": True})).json()["artifacts"]
    claims = {**JOB, "wait": True, "validation": {"artifacts": proved}}
    assert (await server.post(GENERATE, claims)).status_code == 200
    forged = {**claims, "public_key": "another"}
    assert (await server.post(GENERATE, forged)).json()["fraud_detected"] is True
    server.engine.faults = 1
    assert (await server.post(GENERATE, claims)).status_code == 503
    seen = await scrape(registry)
    outcomes = [seen["validations_total", name] for name in ("honest", "fraud", "error")]
    assert outcomes == [1, 1, 1]
    assert seen["nonces_total", "proved,validation"] == 2 * len(JOB["nonces"])
    assert seen["refusals_total", "engine_fault,503"] == 1


async def test_judged_winners_count_and_a_refusal_does_not_count_as_an_error(
    server: Server, registry: CollectorRegistry
) -> None:
    await server.post("/init/validate", ROUND)
    assert (await server.post("/validate", CLAIMS)).status_code == 200
    assert (await server.post("/validate", {**CLAIMS, "block_height": 8})).status_code == 409
    seen = await scrape(registry)
    assert seen["validations_total", "honest"] + seen["validations_total", "fraud"] == 1
    assert seen["validations_total", "error"] == 0
    assert seen["nonces_total", "proved,validation"] == len(CLAIMS["nonces"])
    assert seen["refusals_total", "other_round,409"] == 1


async def test_refusals_count_by_status_and_reason(
    server: Server, registry: CollectorRegistry
) -> None:
    await server.post(START, ORDER)
    await server.post(START, ORDER)
    await server.post(START, {**ORDER, "node_count": "many"})
    await server.get("/generate/unknown")
    seen = await scrape(registry)
    refused = {labels: n for (name, labels), n in seen.items() if name == "refusals_total"}
    assert refused == {
        "already_generating,409": 1,
        "request_validation,422": 1,
        "unknown_job,404": 1,
    }


async def test_a_part_that_does_not_answer_is_down_and_has_no_values(
    server: Server, registry: CollectorRegistry
) -> None:
    server.engine.gone = True
    server.outbox.full = "no disk"
    seen = await scrape(registry)
    assert (seen["up", "engine"], seen["up", "outbox"]) == (0, 0)
    assert not {"busy_seconds_total", "outbox_pending"} & {name for name, _ in seen}
    assert seen["nonces_total", "proved,job"] == 0


async def test_revived_callbacks_stay_counted_as_expired(
    server: Server, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = replace(await server.outbox.gauges(), expired=2, revived=3)

    async def gauges() -> object:
        return read

    monkeypatch.setattr(server.outbox, "gauges", gauges)
    assert (await scrape(registry))["callbacks_total", "expired"] == 5


async def test_a_pause_of_the_round_is_shown(server: Server, registry: CollectorRegistry) -> None:
    await server.post(START, ORDER)
    assert (await scrape(registry))["round_paused", ""] == 0
    server.outbox.full = "no disk"
    await until(lambda: server.node.manager.status().paused_reason)
    assert (await scrape(registry))["round_paused", ""] == 1
    server.outbox.full = None


async def test_forwards_are_a_histogram(
    server: Server, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = await server.engine.gauges()
    counts = (2, 1, *(0 for _ in FORWARD_BOUNDS_S[2:]), 4)

    async def gauges() -> object:
        return replace(read, busy_s=60.0, forward_counts=counts)

    monkeypatch.setattr(server.engine, "gauges", gauges)
    seen = await scrape(registry)
    assert seen["forward_seconds_bucket", "0.005"] == 2
    assert seen["forward_seconds_bucket", "10.0"] == 3
    assert seen["forward_seconds_bucket", "+Inf"] == seen["forward_seconds_count", ""] == 7
    assert seen["forward_seconds_sum", ""] == seen["busy_seconds_total", ""] == 60.0


async def test_a_scrape_on_the_loop_itself_has_no_values_of_the_node(server: Server) -> None:
    assert list(read_from_thread(server.node, asyncio.get_running_loop())) == []


async def test_the_registry_drops_the_node_when_it_ends(server: Server) -> None:
    registry = CollectorRegistry(auto_describe=True)
    for _ in range(2):
        with exposed(server.node, registry):
            assert await scrape(registry)
        assert await scrape(registry) == {}


async def test_a_node_that_ended_does_not_break_the_page() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    node = object()
    assert list(read_from_thread(node, loop)) == []  # type: ignore[arg-type]


async def test_an_outbox_that_hangs_is_down(
    server: Server, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()
        raise OutboxUnavailable

    monkeypatch.setattr("proofserve.api.node.OUTBOX_ANSWER_S", 0.05)
    monkeypatch.setattr(server.outbox, "gauges", never)
    seen = await scrape(registry)
    assert (seen["up", "engine"], seen["up", "outbox"]) == (1, 0)
