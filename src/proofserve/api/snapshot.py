"""Everything that can be known of a node at one moment, for whoever watches it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from proofserve.api.node import Node
from proofserve.rounds.counters import Work
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable
from proofserve.rounds.status import EngineGauges, OutboxGauges, Status

# What an outbox may take to answer, seconds; the engine's answer has a bound of its own.
OUTBOX_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A node at one moment. ``engine`` and ``outbox`` are None while they cannot be read.

    ``tasks`` are those of the whole event loop, vLLM's among them.
    """

    status: Status
    nonces: Mapping[tuple[Work, str], int]
    validations: Mapping[str, int]
    faults: int
    refusals: Mapping[tuple[int, str], int]
    engine: EngineGauges | None
    outbox: OutboxGauges | None
    tasks: int


async def read(node: Node) -> Snapshot:
    """The reading of now; it takes as long as the slower of engine and outbox, 5 s at most."""
    engine, outbox = await asyncio.gather(_engine(node), _outbox(node))
    totals = node.manager.totals
    return Snapshot(
        status=node.manager.status(),
        nonces=dict(totals.nonces),
        validations=dict(totals.validations),
        faults=totals.faults,
        refusals=dict(node.refusals),
        engine=engine,
        outbox=outbox,
        tasks=len(asyncio.all_tasks()),
    )


async def _engine(node: Node) -> EngineGauges | None:
    try:
        return await node.manager.engine_gauges()
    except (EngineFault, EngineGone):
        return None


async def _outbox(node: Node) -> OutboxGauges | None:
    try:
        async with asyncio.timeout(OUTBOX_ANSWER_S):
            return await node.outbox.gauges()
    except (OutboxUnavailable, TimeoutError):
        return None
