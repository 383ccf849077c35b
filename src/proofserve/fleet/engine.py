"""The members of a fleet as one engine: the nonces of a call are divided among them."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from proofserve.fleet.client import (
    BadAnswer,
    MemberClient,
    MemberError,
    Unreachable,
    artifact_fields,
    distance_fields,
    work_fields,
)
from proofserve.fleet.members import MemberCondition
from proofserve.fleet.records import NoMemberReady, read_status
from proofserve.fleet.watch import FleetWatch
from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.network_schemes import DistanceScheme
from proofserve.rounds.computation import chunks
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.ports import Prove
from proofserve.rounds.records import EngineInfo, ProofBatch, Workload
from proofserve.rounds.status import EngineGauges, over_cores
from proofserve.wire.records import ArtifactRecord, FailedNonce, first_problem
from proofserve.wire.status import DeploymentStatus

# Makes the client of a member's URL.
NewClient = Callable[[str], MemberClient]
# A float32 row for each nonce; None for one without a result.
Rows = dict[int, NDArray[np.float32] | None]
_Share = tuple[int, ...]

# Nonces of one call to a member: some forwards, beside which the call itself takes little time.
_MOST_OF_SHARE = 256
_LEAST_OF_SHARE = 16
# A share that failed on so many members fails the call.
_MOST_TRIES = 3


@dataclass(eq=False, repr=False)
class FleetEngine:
    """Proves on the ready members of ``watch``; the calls of jobs wait while a round runs.

    That is while ``no_round`` is not set; a call that runs when it is cleared begins again later.
    """

    watch: FleetWatch
    client: NewClient
    no_round: asyncio.Event
    cores: int = field(default=1, init=False)

    @property
    def engine_info(self) -> EngineInfo:
        """Raises NoMemberReady before the first member has answered."""
        overview = self.watch.current
        if overview.deployment is None:
            raise NoMemberReady(overview.why_not_ready or "no member has answered yet")
        return overview.deployment.engine_info

    @property
    def nonces_of_call(self) -> int:
        """How many nonces one call should have, so that no ready member is idle."""
        return _MOST_OF_SHARE * max(1, len(self.watch.current.ready))

    @asynccontextmanager
    async def session(
        self,
        work: Workload,
        core: int | None = None,  # noqa: ARG002 - as the port
    ) -> AsyncIterator[Prove]:
        yield partial(self._prove, work)

    async def gauges(self) -> EngineGauges:
        """The sums over all ready members, and the longest durations. Raises NoMemberReady."""
        engines = [each.status.engine for each in self._ready() if each.status]
        return replace(over_cores([each for each in engines if each]), cores=())

    async def fit(self, work: Workload) -> None:
        """Nothing: each member does it when its part of a round begins."""

    async def self_check(self) -> float:
        """Seconds of a forward on the slowest member. Raises NoMemberReady and EngineFault."""
        ready = self._ready()
        calls = (self.client(each.member.url).self_check() for each in ready)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if seconds := [each for each in answers if isinstance(each, float)]:
            return max(seconds)
        named = zip(ready, answers, strict=True)
        reasons = [f"{condition.member.name}: {answer}" for condition, answer in named]
        raise EngineFault("; ".join(reasons[:3]))

    def _ready(self) -> Sequence[MemberCondition]:
        overview = self.watch.current
        if reason := overview.why_not_ready:
            raise NoMemberReady(reason)
        return overview.ready

    async def _prove(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        """Raises NoMemberReady, and EngineFault with the reasons of the members that failed."""
        if isinstance(work.scheme, DistanceScheme):
            # Members judge during a round, too.
            return _batch(work, nonces, await _DividedCall(self, work, nonces).run())
        while True:
            await self.no_round.wait()
            proving = asyncio.create_task(_DividedCall(self, work, nonces).run())
            # A member proves no job while it has a round. Without this the call would wait inside
            # the member for the round's end, hours later.
            interrupted = asyncio.create_task(self._round_begins())
            try:
                await asyncio.wait({proving, interrupted}, return_when=asyncio.FIRST_COMPLETED)
                if proving.done():
                    return _batch(work, nonces, proving.result())
            finally:
                proving.cancel()
                interrupted.cancel()
                await asyncio.gather(proving, interrupted, return_exceptions=True)

    async def _round_begins(self) -> None:
        while self.no_round.is_set():
            await self.watch.next_change()


def _batch(work: Workload, nonces: Sequence[int], rows: Rows) -> ProofBatch:
    found = {nonce: row for nonce in nonces if (row := rows[nonce]) is not None}
    values = np.array([*found.values()], np.float32).reshape(len(found), work.scheme.width)
    failed = tuple(nonce for nonce in nonces if nonce not in found)
    return ProofBatch(tuple(found), values, failed)


class _DividedCall:
    """Computes ``nonces`` once on ready members; the share of one that fails goes to another."""

    def __init__(self, engine: FleetEngine, work: Workload, nonces: Sequence[int]) -> None:
        self._engine = engine
        self._work = work
        self._watch = engine.watch
        ready = max(1, len(self._watch.current.ready))
        size = min(_MOST_OF_SHARE, max(_LEAST_OF_SHARE, -(-len(nonces) // ready)))
        self._waiting = deque(chunks(nonces, size))
        # The members that failed a share, and what each member computes.
        self._tried: defaultdict[_Share, set[str]] = defaultdict(set)
        self._running: dict[str, tuple[_Share, asyncio.Task[Rows]]] = {}
        self._reasons: dict[str, str] = {}
        self._reached = False
        self._rows: Rows = {}

    async def run(self) -> Rows:
        """Raises as ``FleetEngine._prove``."""
        try:
            while self._waiting or self._running:
                self._assign()
                if not self._running:
                    raise self._no_member_left()
                await self._until_something_ends()
                self._settle()
        finally:
            tasks = [task for _, task in self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._rows

    def _assign(self) -> None:
        """Give each ready member without a share one that it has not failed."""
        for member in self._watch.current.ready:
            id_ = member.member.id
            if id_ in self._running:
                continue
            share = next((each for each in self._waiting if id_ not in self._tried[each]), None)
            if share is None:
                continue
            if member.deployment is None:
                raise AssertionError("only a member that says what is deployed is ready")
            self._waiting.remove(share)
            client = self._engine.client(member.member.url)
            computing = compute_share(client, self._work, share, member.deployment)
            self._running[id_] = (share, asyncio.create_task(computing))

    async def _until_something_ends(self) -> None:
        """Wait for the end of a share, or for news of the members."""
        change = asyncio.create_task(self._watch.next_change())
        try:
            tasks = {task for _, task in self._running.values()}
            await asyncio.wait({change, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            await asyncio.gather(change, return_exceptions=True)

    def _settle(self) -> None:
        for id_, (share, task) in list(self._running.items()):
            member = self._watch.current.by_id.get(id_)
            name = member.member.name if member else id_
            if task.done():
                del self._running[id_]
                self._take(id_, name, share, task)
            elif member is None or not member.is_ready:
                del self._running[id_]
                task.cancel()
                state = f"is {member.state}: {member.reason}" if member else "was removed"
                self._reasons[id_] = f"{name} {state}"
                self._waiting.appendleft(share)

    def _take(self, id_: str, name: str, share: _Share, task: "asyncio.Task[Rows]") -> None:
        try:
            self._rows |= task.result()
        except MemberError as error:
            self._tried[share].add(id_)
            self._reached |= not isinstance(error, Unreachable)
            self._reasons[id_] = f"{name}: {error}"
            if len(self._tried[share]) >= _MOST_TRIES:
                raise self._no_member_left() from error
            self._waiting.appendleft(share)

    def _no_member_left(self) -> EngineFault | NoMemberReady:
        reasons = "; ".join(list(self._reasons.values())[:3])
        if reason := self._watch.current.why_not_ready:
            return NoMemberReady(f"{reason}; {reasons}" if reasons else reason)
        text = f"no member could compute a share: {reasons}"
        return EngineFault(text) if self._reached else NoMemberReady(text)


class _ShareProofs(BaseModel):
    artifacts: list[ArtifactRecord]
    failed: list[FailedNonce] = []


class _ShareDistances(BaseModel):
    computed_distances: list[Annotated[FiniteFloat, Field(ge=0, le=3)]]


async def compute_share(
    client: MemberClient, work: Workload, nonces: Sequence[int], deployed: DeploymentStatus
) -> Rows:
    """The proofs of ``nonces`` by this member. Raises MemberError."""
    try:
        if isinstance(work.scheme, DistanceScheme):
            return await _distances(client, work, nonces)
        return await _vectors(client, work, nonces, deployed)
    except ValidationError as error:
        problem = ": ".join(first_problem(error))
        raise BadAnswer(f"answered nonsense to a job: {problem}") from error


async def _vectors(
    client: MemberClient, work: Workload, nonces: Sequence[int], deployed: DeploymentStatus
) -> Rows:
    asked = {"node_id": 0, "node_count": 1, "nonces": list(nonces), "wait": True}
    answer = await client.job("/generate", artifact_fields(work, deployed) | asked)
    proved = _ShareProofs.model_validate(answer)
    width = work.scheme.width
    try:
        rows = {each.nonce: decode(each.vector_b64, width) for each in proved.artifacts}
    except MalformedVector as error:
        raise BadAnswer(f"answered nonsense to a job: {error}") from error
    failed = {each.nonce for each in proved.failed}
    if rows.keys() | failed != set(nonces) or rows.keys() & failed:
        raise BadAnswer("answered for other nonces than it was asked for")
    return {**rows, **dict.fromkeys(failed)}


async def _distances(client: MemberClient, work: Workload, nonces: Sequence[int]) -> Rows:
    body, _ = await client.status()
    try:
        status = read_status(body)
    except ValueError as error:
        raise BadAnswer(f"answered nonsense to GET /status: {error}") from error
    if not status.judges(work):
        # Not always: this replaces the configured round, which may go on in its lane later.
        await client.change("/init", {**distance_fields(work), "r_target": 1.0})
    # The claims do not matter.
    claims = {"node_id": 0, "nonces": list(nonces), "dist": [0.0] * len(nonces)}
    answer = await client.job("/validate", work_fields(work) | claims)
    computed = _ShareDistances.model_validate(answer).computed_distances
    if len(computed) != len(nonces):
        raise BadAnswer("answered for other nonces than it was asked for")
    rows = zip(nonces, computed, strict=True)
    return {nonce: np.array([value], np.float32) for nonce, value in rows}
