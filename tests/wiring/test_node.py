"""A node starts, ends and starts again, and its round continues or is closed."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from proofserve.api.access import LOCAL, ApiError
from proofserve.api.node import Node
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import RoundSpec, Target, Workload
from proofserve.rounds.state import Move, State
from proofserve.settings.node import NodeSettings
from proofserve.wiring.node import running_node
from rounds.doubles import round_spec
from support.fake_engine import FakeEngine
from support.pace import until

pytestmark = pytest.mark.anyio

LANE = NonceLane(1, 3)


def settings(folder: Path, resume: bool = False, **more: Any) -> NodeSettings:
    return NodeSettings(enabled=True, outbox=folder / "outbox.sqlite", resume=resume, **more)


def engine() -> FakeEngine:
    made = FakeEngine()
    made.latency_s = 0.001
    return made


def distance_spec() -> RoundSpec:
    work = Workload(scheme("distance-v1", layer_hooks=True), Block("block", 7), "key", 16)
    return round_spec(work=work, target=Target(2.0))


async def stored_by(node: Node, more_than: int) -> None:
    await until(lambda: _processed(node) > more_than)


def _processed(node: Node) -> int:
    stats = node.manager.status().stats
    return stats.total_processed if stats else 0


@pytest.mark.parametrize("spec", [distance_spec(), round_spec()], ids=["distance", "artifact"])
async def test_a_round_continues_after_a_restart(spec: RoundSpec, tmp_path: Path) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.manager.configure(spec, Move.START)
        await stored_by(node, 20)
    before = 0
    for _ in range(2):
        async with running_node(engine(), settings(tmp_path, resume=True)) as node:
            status = node.manager.status()
            assert (status.state, status.spec) == (State.GENERATING, spec)
            assert _processed(node) > before
            before = _processed(node)
            await stored_by(node, before + 20)
    async with running_node(engine(), settings(tmp_path, resume=True)) as node:
        await node.manager.stop()
        rows = await node.outbox.results(0, 10_000)
        assert [row.nonce for row in rows] == list(LANE.batch(0, len(rows)))
        assert len(rows) > before + 20
    async with running_node(engine(), settings(tmp_path, resume=True)) as node:
        assert node.manager.status().state is State.IDLE


async def test_without_the_option_the_round_is_closed(tmp_path: Path) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.manager.configure(distance_spec(), Move.START)
        await stored_by(node, 0)
    async with running_node(engine(), settings(tmp_path)) as node:
        assert node.manager.status().state is State.IDLE
    async with running_node(engine(), settings(tmp_path, resume=True)) as node:
        assert node.manager.status().state is State.IDLE


async def test_a_round_that_a_fault_has_ended_continues(tmp_path: Path) -> None:
    broken = engine()
    async with running_node(broken, settings(tmp_path)) as node:
        await node.manager.configure(distance_spec(), Move.START)
        await stored_by(node, 0)
        broken.gone = True
        await until(lambda: node.manager.status().state is State.STOPPED)
        assert node.manager.status().error
    async with running_node(engine(), settings(tmp_path, resume=True)) as node:
        assert node.manager.status().state is State.GENERATING


@pytest.mark.parametrize(
    ("work", "deployed", "reason"),
    [
        (
            Workload(scheme("artifact-v1-layers"), Block("block", 7), "key", 16),
            {"scheme": "artifact-v1"},
            "it is of scheme artifact-v1-layers, deployed is artifact-v1",
        ),
        (
            Workload(scheme("artifact-v1"), Block("block", 7), "key", 100_000),
            {},
            "its seq_len 100000 exceeds",
        ),
        (
            Workload(scheme("artifact-v1", k_dim=65), Block("block", 7), "key", 16),
            {},
            "k_dim: 65 exceeds the hidden size 64",
        ),
    ],
    ids=["another scheme", "beyond the context", "another model"],
)
async def test_a_round_of_another_deployment_does_not_continue(
    work: Workload,
    deployed: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.outbox.open_round(round_spec(work=work))
    async with running_node(engine(), settings(tmp_path, resume=True, **deployed)) as node:
        assert node.manager.status().state is State.IDLE
        assert f"cannot continue and is closed: {reason}" in caplog.text


async def test_a_round_of_any_scheme_continues_where_none_is_set(tmp_path: Path) -> None:
    spec = round_spec(work=Workload(scheme("sketch-v1"), Block("block", 7), "key", 16))
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.outbox.open_round(spec)
    async with running_node(engine(), settings(tmp_path, resume=True)) as node:
        assert node.manager.status().spec == spec


async def test_callbacks_follow_allowlist_and_secret(tmp_path: Path) -> None:
    chosen = NodeSettings(
        enabled=True,
        outbox=tmp_path / "outbox.sqlite",
        callback_allow=("127.0.0.2/32",),
        callback_secret=SecretStr("shared"),
    )
    heads: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with (
        await asyncio.start_server(take, "127.0.0.2", 0) as target,
        running_node(engine(), chosen) as node,
    ):
        port = target.sockets[0].getsockname()[1]
        with pytest.raises(ValueError, match="--poc-callback-allow"):
            await node.deployment.check_url(f"http://127.0.0.1:{port}")
        assert await node.deployment.check_url(f"http://127.0.0.2:{port}") is None
        await node.outbox.enqueue("validated", f"http://127.0.0.2:{port}", {})
        await until(lambda: bool(heads))
    assert b"x-proofserve-signature: v1=" in heads[0].lower()


async def test_delivered_results_are_deleted_after_the_days_of_the_settings(tmp_path: Path) -> None:
    async with running_node(engine(), settings(tmp_path)) as node:
        await node.manager.configure(round_spec(), Move.START)
        await stored_by(node, 20)
        await node.manager.stop()
        assert await node.outbox.results(0, 10)
    # A millisecond or so.
    chosen = settings(tmp_path).model_copy(update={"outbox_keep_days": 1e-8})
    async with running_node(engine(), chosen) as node:
        async with asyncio.timeout(10):
            while await node.outbox.results(0, 10):  # noqa: ASYNC110 - the node sets no event
                await asyncio.sleep(0.01)


async def test_with_0_days_results_stay_for_ever(tmp_path: Path) -> None:
    chosen = settings(tmp_path).model_copy(update={"outbox_keep_days": 0.0})
    async with running_node(engine(), chosen) as node:
        await node.manager.configure(round_spec(), Move.START)
        await stored_by(node, 20)
        await node.manager.stop()
    async with running_node(engine(), chosen) as node:
        await asyncio.sleep(0.2)
        assert await node.outbox.results(0, 10)


async def test_a_callback_entry_that_is_not_valid_stops_the_node(tmp_path: Path) -> None:
    chosen = NodeSettings(outbox=tmp_path / "outbox.sqlite", callback_allow=("everywhere",))
    with pytest.raises(ValueError, match="POC_CALLBACK_ALLOW: 'everywhere' is neither"):
        async with running_node(engine(), chosen):
            pass


async def test_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    chosen = NodeSettings(
        enabled=True,
        outbox=tmp_path / "outbox.sqlite",
        max_body_bytes=7,
        max_open_waits=1,
        requests_per_minute=2,
        api_key=(SecretStr("one"),),
    )
    async with running_node(engine(), chosen) as node:
        assert node.deployment.max_body_bytes == 7
        assert node.access.names == ["operator-1 (operator)"]
        with node.call_limits.waiting(), pytest.raises(ApiError), node.call_limits.waiting():
            pass
        for _ in range(2):
            node.call_limits.count(LOCAL)
        with pytest.raises(ApiError):
            node.call_limits.count(LOCAL)
