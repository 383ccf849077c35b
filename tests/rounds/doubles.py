"""An outbox in memory, orders to give, and waiting for something to become true."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from proofserve.protocol.commitments import Opening
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.errors import OutboxUnavailable, Refusal, Refused
from proofserve.rounds.records import (
    CommittedRound,
    CompletedJob,
    Deferred,
    DistanceVerdict,
    Finding,
    Job,
    Limits,
    ProofBatch,
    RoundProgress,
    RoundSpec,
    StoredResult,
    Winner,
    Workload,
)
from proofserve.rounds.status import OutboxGauges
from proofserve.wire.callbacks import callback
from support.fake_engine import FakeEngine

WORK = Workload(scheme("artifact-v1"), Block("block", 7), "key", 16)
# What takes seconds in service takes milliseconds here.
QUICK = Limits(
    record_retry_s=0.01,
    fault_backoff_s=(0.01, 0.02, 0.04),
    max_queued_nonces=100,
    chunk_timeout_s=30,
    result_ttl_s=30,
    callback_retry_s=0.01,
    engine_answer_s=0.2,
    engine_busy_s=0.05,
)


class MemoryOutbox:
    """Keeps rows and callbacks in lists; ``full`` is the text of the trouble it is in, if any."""

    def __init__(self) -> None:
        self.full: str | None = None
        self.latency_s = 0.0
        self.held: asyncio.Event | None = None
        """If given, what is to be stored waits for it."""
        self.open: list[str] = []
        self.closed: list[str] = []
        self.reached: dict[str, RoundProgress] = {}
        self.specs: dict[str, RoundSpec] = {}
        self.rows: list[StoredResult] = []
        self.progress: list[int] = []
        self.callbacks: list[tuple[str, str, Mapping[str, Any]]] = []
        self.attempts = 0

    async def open_round(self, spec: RoundSpec) -> RoundProgress:
        await self._take()
        self.open.append(spec.round_id)
        self.specs[spec.round_id] = spec
        return self.reached.setdefault(spec.round_id, RoundProgress())

    async def interrupted(self) -> RoundSpec | None:
        last = self.open[-1] if self.open else None
        return None if last is None or last in self.closed else self.specs[last]

    async def record(
        self, round_id: str, next_index: int, findings: Sequence[Finding], failed: Mapping[int, str]
    ) -> None:
        if self.held is not None:
            await self.held.wait()
        await self._take()
        for one in findings:
            seq = len(self.rows) + 1
            if isinstance(one, Winner):
                row = StoredResult(seq, round_id, one.nonce, distance=one.distance)
            else:
                row = StoredResult(seq, round_id, one.nonce, one.vector_b64)
            self.rows.append(row)
        for nonce, reason in failed.items():
            self.rows.append(StoredResult(len(self.rows) + 1, round_id, nonce, error=reason))
        self.progress.append(next_index)
        before = self.reached.get(round_id, RoundProgress())
        self.reached[round_id] = RoundProgress(
            next_index, before.found + len(findings), before.failed + len(failed)
        )

    async def close_round(self, round_id: str) -> None:
        await self._take()
        self.closed.append(round_id)

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        await self._take()
        self.callbacks.append((endpoint, url, body))

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        self._require_room()
        return self.rows[after : after + limit]

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        self._require_room()
        found = [
            Winner(row.nonce, row.distance)
            for row in self.rows
            if row.round_id == round_id and row.distance is not None
        ]
        return found[-limit:]

    async def committed_round(
        self, block_hash: str, public_key: str, round_id: str | None
    ) -> CommittedRound:
        raise Refused(
            Refusal.UNKNOWN_ROUND,
            f"no round of block {block_hash}, key {public_key}, id {round_id}",
        )

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        raise Refused(
            Refusal.UNKNOWN_ROUND,
            f"round {committed.round_id} with {len(nonces)} nonces is deleted",
        )

    async def probe(self) -> None:
        await self._take()

    async def gauges(self) -> OutboxGauges:
        self._require_room()
        return OutboxGauges(len(self.rows), len(self.callbacks), 0, 0, 0.0, None)

    @property
    def nonces(self) -> list[int]:
        return [row.nonce for row in self.rows]

    async def _take(self) -> None:
        self.attempts += 1
        await asyncio.sleep(self.latency_s)
        self._require_room()

    def _require_room(self) -> None:
        if self.full is not None:
            raise OutboxUnavailable(self.full)


def round_spec(name: str = "round", **changes: Any) -> RoundSpec:
    values = {
        "round_id": name,
        "work": WORK,
        "lane": NonceLane(1, 3),
        "batch_size": 4,
        "url": None,
        **changes,
    }
    return RoundSpec(**values)


def job(*nonces: int, **changes: Any) -> Job:
    values = {"work": WORK, "nonces": nonces, "batch_size": 4, "node_id": 1}
    return Job(**{**values, **changes})


def claims_of(proofs: Sequence[Claim]) -> tuple[Claim, ...]:
    """Claims equal to ``proofs``."""
    return tuple(Claim(a.nonce, a.vector_b64) for a in proofs)


async def computed(engine: FakeEngine, *nonces: int, work: Workload = WORK) -> ProofBatch:
    batch = await engine.answer(work, nonces)
    if isinstance(batch, Deferred):
        raise TypeError("the fake engine was told to defer")
    return batch
