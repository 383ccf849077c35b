"""A node ends: it posts due callbacks, and the others stay in the outbox."""

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from outbox.support import FastClock, Target, running_target
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.errors import Refusal
from proofserve.rounds.state import Move
from proofserve.settings.node import NodeSettings
from proofserve.wiring import node as node_module
from proofserve.wiring.node import running_node
from rounds.doubles import job, round_spec
from support.fake_engine import FakeEngine
from support.pace import until
from support.refusals import refused

pytestmark = pytest.mark.anyio


@pytest.fixture
def target() -> Iterator[Target]:
    with running_target(FastClock()) as made:
        yield made


def settings(folder: Path, **changes: object) -> NodeSettings:
    values = {"enabled": True, "outbox": folder / "outbox.sqlite", "callback_interval_sec": 3600.0}
    return NodeSettings(**{**values, **changes})  # type: ignore[arg-type]


def engine() -> FakeEngine:
    made = FakeEngine()
    made.latency_s = 0.001
    return made


async def left_in(folder: Path) -> int:
    async with await SqliteOutbox.open(folder / "outbox.sqlite") as outbox:
        return (await outbox.gauges()).pending


async def test_the_results_of_a_running_round_are_delivered_before_the_end(
    target: Target, tmp_path: Path
) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.manager.configure(round_spec(url=target.url), Move.START)
        await until(lambda: (stats := node.manager.status().stats) and stats.total_processed > 20)
        assert target.arrivals == []
    async with await SqliteOutbox.open(tmp_path / "outbox.sqlite") as outbox:
        rows = await outbox.results(0, 10_000)
        assert target.nonces() == [row.nonce for row in rows]
        assert (await outbox.gauges()).pending == 0


async def test_a_receiver_that_refuses_gets_one_attempt_and_delays_nothing(
    target: Target,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target.answer = lambda _arrival: 503
    late = partial(CallbackPolicy, backoff_first_s=60.0, backoff_longest_s=60.0)
    monkeypatch.setattr(node_module, "CallbackPolicy", late)
    # With such a bound the test times out if the node waits for all of it.
    with caplog.at_level("WARNING", "proofserve"):
        async with running_node(engine(), settings(tmp_path, shutdown_flush_sec=3600.0)) as node:
            await node.manager.configure(round_spec(url=target.url), Move.START)
            await until(
                lambda: (stats := node.manager.status().stats) and stats.total_processed > 20
            )
    assert len(target.arrivals) == 1
    assert await left_in(tmp_path) == 1
    assert "1 callbacks stay in the outbox" in caplog.text


async def test_a_receiver_that_hangs_delays_the_end_by_its_bound_and_loses_no_result(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with running_node(engine(), settings(tmp_path, shutdown_flush_sec=0.2)) as node:
            await node.outbox.enqueue("validated", url, {"n": 1})
    assert await left_in(tmp_path) == 1


async def test_the_next_start_sends_the_callbacks_that_remained(
    target: Target, tmp_path: Path
) -> None:
    async with running_node(engine(), settings(tmp_path, shutdown_flush_sec=0.0)) as node:
        await node.manager.configure(round_spec(url=target.url), Move.START)
        await until(lambda: (stats := node.manager.status().stats) and stats.total_processed > 20)
    assert target.accepted == []
    async with running_node(engine(), settings(tmp_path)) as node:
        await until(lambda: target.accepted)
        rows = await node.outbox.results(0, 10_000)
        assert target.nonces() == [row.nonce for row in rows]


async def test_no_work_begins_after_the_end_has_begun(tmp_path: Path) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.manager.configure(round_spec(), Move.START)
        waiting = asyncio.create_task(node.manager.run(job(1, 2, 3)))
        await until(lambda: node.manager.status().queue.queued_nonces)
        await node.manager.aclose()
        for begin in (
            node.manager.configure(round_spec("other"), Move.START),
            node.manager.run(job(1)),
        ):
            with refused(Refusal.SHUTTING_DOWN, match="shutting down"):
                await begin
        with refused(Refusal.SHUTTING_DOWN):
            await node.manager.submit(job(1))
        await node.manager.stop()
        # A job that was accepted before is finished while the engine lives.
        assert len((await waiting).artifacts) == 3  # type: ignore[union-attr]
