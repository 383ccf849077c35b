"""The fleet as the routes of a node see it: its rounds and jobs, and what it has stored."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pydantic import Field, TypeAdapter, ValidationError

from proofserve.fleet.client import MemberError
from proofserve.fleet.engine import FleetEngine, NewClient
from proofserve.fleet.members import START_LOST_S
from proofserve.fleet.records import MemberRound, NoMemberReady, StoreUnavailable, part_of
from proofserve.fleet.sql.requests import RequestStore, read_job
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.protocol.commitments import CommittedBatch, Opening
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.computation import Computation, NonceLimit
from proofserve.rounds.errors import EngineFault, Refusal, Refused
from proofserve.rounds.generation import lane_of
from proofserve.rounds.ports import NodeManager
from proofserve.rounds.records import (
    CommittedRound,
    CompletedJob,
    DistanceClaims,
    DistanceVerdict,
    Job,
    JobView,
    Limits,
    Outcome,
    RoundSpec,
)
from proofserve.rounds.state import Move, State, step
from proofserve.rounds.status import EngineGauges, NodeTotals, QueueGauges, Status
from proofserve.rounds.tasks import reason_of, woken
from proofserve.wire.records import Hash, OpeningRecord, Whole

_logger = logging.getLogger(__name__)

# How often the leader looks for jobs of other controllers, and whether one was cancelled. Seconds.
_LOOK_EVERY_S = 1.0
# So often a job is begun, by all leaders: it may be what makes members or controllers end.
_MOST_ATTEMPTS = 5


@dataclass(eq=False, repr=False)
class FleetJobs:
    """Jobs of /generate as rows: any controller takes them and shows them.

    The one that leads computes them in ``compute_for_ever``, one at a time. A call that waits for
    its result is computed by the controller that was asked, in its turn. The admission of
    ``computation`` counts the nonces of such calls, and of judgements.
    """

    _store: RequestStore
    _watch: FleetWatch
    _engine: FleetEngine
    _computation: Computation
    _limits: Limits
    _turns: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def gauges(self) -> QueueGauges:
        """The nonces of all stored jobs, and of this controller's calls that wait."""
        waiting = self._computation.admission.gauges
        return replace(
            waiting, queued_nonces=waiting.queued_nonces + self._watch.current.view.queued_nonces
        )

    async def submit(self, job: Job) -> str:
        """Queue ``job`` and return its id. Raises Refused (QUEUE_FULL) and StoreUnavailable."""
        request_id = str(uuid.uuid4())
        waiting = self._computation.admission.gauges
        await self._store.add(request_id, job, waiting.limit - waiting.queued_nonces)
        self._news.set()
        return request_id

    async def run(self, job: Job) -> Outcome:
        """As the port: compute ``job`` while the caller waits."""
        with self._computation.admission.admitted(len(job.nonces)):
            async with self._turns:
                return await self._compute(job)

    async def result(self, request_id: str) -> JobView:
        """Raises StoreUnavailable, and Refused once the result has expired."""
        view = await self._store.view(request_id, self._limits.result_ttl_s)
        if view is None:
            raise Refused(Refusal.UNKNOWN_JOB, f"Request {request_id} not found")
        return view

    async def cancel(self) -> None:
        """End all stored jobs. Raises StoreUnavailable."""
        await self._store.cancel_all()
        self._news.set()

    async def compute_for_ever(self) -> None:
        """Compute stored jobs until cancelled; the next leader begins again with an open one."""
        while True:
            found = False
            try:
                await self._store.expire(self._limits)
                found = await self._compute_oldest()
            except StoreUnavailable as error:
                _logger.warning("stored jobs wait: %s", error)
            except Exception:
                _logger.exception("a stored job could not be computed")
            if not found:
                await woken(self._news, _LOOK_EVERY_S)
                self._news.clear()

    async def _compute_oldest(self) -> bool:
        """Compute the oldest open job; False if there is none that can be computed now."""
        if not self._computation.no_round.is_set() or not self._watch.current.ready:
            return False
        async with self._turns:
            begun = await self._store.begin()
            if begun is None:
                return False
            request_id, job_text, attempt = begun
            if attempt > _MOST_ATTEMPTS:
                text = f"{_MOST_ATTEMPTS} attempts ended without a result"
                await self._store.fail(request_id, text)
                return True
            job = await asyncio.to_thread(read_job, job_text)
            computing = asyncio.create_task(self._compute(job))
            try:
                if await self._cancelled(request_id, computing):
                    return True
            finally:
                computing.cancel()
                await asyncio.gather(computing, return_exceptions=True)
        if isinstance(computing.exception(), NoMemberReady) and attempt < _MOST_ATTEMPTS:
            await self._store.wait_again(request_id)
            return False
        await self._settle(request_id, job, computing)
        return True

    async def _compute(self, job: Job) -> Outcome:
        """Calls are large enough for all members; results do not depend on it."""
        wide = replace(job, batch_size=max(job.batch_size, self._engine.nonces_of_call))
        return await self._computation.run(wide, started=lambda: None)

    async def _cancelled(self, request_id: str, computing: "asyncio.Task[Outcome]") -> bool:
        """Wait for the end of ``computing``, or of its job by a stop in any controller."""
        while True:
            await asyncio.wait({computing}, timeout=_LOOK_EVERY_S)
            if computing.done():
                return False
            # Without the database the work goes on: nothing says that it was cancelled.
            with suppress(StoreUnavailable):
                if not await self._store.is_open(request_id):
                    return True

    async def _settle(self, request_id: str, job: Job, done: "asyncio.Task[Outcome]") -> None:
        error = reason_of(done)
        while True:
            try:
                if error is not None:
                    await self._store.fail(request_id, error)
                else:
                    await self._store.finish(CompletedJob(request_id, job, done.result()))
            except StoreUnavailable as unavailable:
                _logger.warning("job %s is stored later: %s", request_id, unavailable)
                await asyncio.sleep(self._limits.callback_retry_s)
            else:
                break
        how = "completed" if error is None else f"failed: {error}"
        known = {"request_id": request_id}
        _logger.info("job %s of %d nonces: %s", request_id, len(job.nonces), how, extra=known)


# How often a call that waits for the members looks again, seconds.
_LOOK_AGAIN_S = 0.2
_REASONS: Mapping[int, Refusal] = {404: Refusal.UNKNOWN_NONCE, 410: Refusal.VECTORS_DELETED}


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``lanes`` of each round; how long a start waits for the members, and a stop for results.

    Times in seconds. The members go on starting, or delivering, when the wait is over.
    """

    lanes: int = 64
    start_wait_s: float = 3.0
    stop_wait_s: float = 10.0
    jobs: Limits = field(default_factory=Limits)


class FleetManager(NodeManager):
    """A node of all members: it stores what is desired, and ``wake`` has it done."""

    def __init__(
        self,
        store: FleetStore,
        watch: FleetWatch,
        client: NewClient,
        wake: Callable[[], None],
        limits: FleetLimits,
    ) -> None:
        self._store = store
        self._watch = watch
        self._wake = wake
        self._limits = limits
        self.totals = NodeTotals()
        self._no_round = asyncio.Event()
        self._no_round.set()
        self._engine = FleetEngine(watch, client, self._no_round)
        self._computation = Computation(
            self._engine,
            self._no_round,
            NonceLimit(limits.jobs.max_queued_nonces),
            limits.jobs.chunk_timeout_s,
            self.totals,
            time.monotonic,
        )
        self.jobs = FleetJobs(store.requests, watch, self._engine, self._computation, limits.jobs)

    async def follow(self) -> None:
        """Follow the database until cancelled: another controller may have started a round."""
        while True:
            self._follow(self._watch.current)
            await self._watch.next_change()

    async def configure(self, spec: RoundSpec, move: Move) -> None:
        """As the port. Also raises ProtocolError for a lane that is too short to be divided."""
        lanes = self._limits.lanes
        if move is Move.START:
            own = lane_of(spec)
            try:
                # Whether the last lane has a batch.
                part_of(own, lanes - 1, lanes).batch(0, spec.batch_size)
            except ProtocolError:
                text = f"divided into {lanes} lanes, this server has less than a batch of nonces"
                raise ProtocolError("node_count", text) from None
        self.require_open()
        await self._store.open_round(spec, lanes, move)
        await self._changed()
        if move is Move.START:
            await self._until(_all_started, self._limits.start_wait_s)
        elif move is Move.INIT_VALIDATE:
            await self._until(_settled, self._limits.stop_wait_s)

    async def generate(self) -> None:
        await self._move(Move.GENERATE)
        await self._until(_all_started, self._limits.start_wait_s)

    async def validate(self) -> None:
        await self._move(Move.VALIDATE)
        await self._until(_settled, self._limits.stop_wait_s)

    async def judge(self, claims: DistanceClaims, of_round: bool = True) -> DistanceVerdict:
        self.require_open()
        desired = (await self._watch.refresh()).desired
        step(desired.state, Move.JUDGE, desired.configured)
        if desired.round is None or desired.round.spec.target is None:
            raise Refused(Refusal.NOT_INITIALISED, "No round configured")
        spec, target = desired.round.spec, desired.round.spec.target
        wide = replace(spec, batch_size=max(spec.batch_size, self._engine.nonces_of_call))
        verdict = await self._computation.judge(wide, target, claims)
        if of_round and desired.state is State.VALIDATING and spec.url is not None:
            await self._store.push(spec.url, verdict)
        self.totals.computed("validation", len(claims.nonces), 0)
        return verdict

    async def stop(self) -> None:
        """As the port. Waits, but not for ever, until members have delivered what they stored."""
        await self.jobs.cancel()
        await self._move(Move.STOP)
        await self._until(_settled, self._limits.stop_wait_s)

    def status(self) -> Status:
        overview = self._watch.current
        desired = overview.desired
        return Status(
            state=desired.state,
            spec=desired.round.spec if desired.round else None,
            stats=overview.round_stats(time.time()),
            paused_reason=overview.paused_reason,
            error=None,
            queue=self.jobs.gauges,
            lanes=overview.lane_use,
        )

    async def submit(self, job: Job) -> str:
        self.require_open()
        return await self.jobs.submit(job)

    async def run(self, job: Job) -> Outcome:
        self.require_open()
        return await self.jobs.run(job)

    async def result(self, request_id: str) -> JobView:
        return await self.jobs.result(request_id)

    async def engine_gauges(self) -> EngineGauges:
        return await self._engine.gauges()

    async def self_check(self) -> float:
        self.require_open()
        return await self._engine.self_check()

    async def aclose(self) -> None:
        """Refuse new work. Rounds and jobs go on: another controller, or the next start, leads."""
        self.is_closing = True

    async def _move(self, move: Move) -> None:
        if move is not Move.STOP:
            self.require_open()
        await self._store.move(move)
        await self._changed()

    async def _changed(self) -> None:
        self._follow(await self._watch.refresh())
        self._wake()

    async def _until(self, true: Callable[[Overview], bool], seconds: float) -> None:
        """Wait for the members, at most ``seconds``."""
        began = self._watch.current.view.at
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            overview = self._watch.current
            if overview.view.at > began and true(overview):
                return
            self._wake()
            await asyncio.sleep(_LOOK_AGAIN_S)
            self._follow(await self._watch.refresh())

    def _follow(self, overview: Overview) -> None:
        if overview.desired.state is State.GENERATING:
            self._no_round.clear()
        else:
            self._no_round.set()


def _all_started(overview: Overview) -> bool:
    """Whether each ready member has a lane with a known round, or one that failed."""
    generating = {each.member.id for each in overview.proving}
    return all(
        (lane := overview.newest.get(each.member.id)) is not None
        and (lane.member_id in generating or lane.ended_at is not None)
        for each in overview.ready
    )


def _settled(overview: Overview) -> bool:
    """Whether no member generates for the fleet, and all that they found is stored here."""
    for lane in overview.view.lanes:
        is_known = lane.ended_at is not None or lane.member_round_id is not None
        if not is_known and overview.view.at - lane.given_at < START_LOST_S:
            # A start call of it may still be on its way.
            return False
        member = overview.by_id.get(lane.member_id)
        status = member.status if member and member.answered else None
        if status is None or lane.member_round_id != status.round_id:
            continue
        found = status.stats.total_found if status.stats else 0
        if status.generates or lane.stored < found:
            return False
    return True


class _MemberOpening(OpeningRecord):
    index: Whole
    first_index: Whole
    count: int = Field(ge=1)
    root: Hash

    @property
    def opening(self) -> Opening:
        # The answer of /open shows no previous root.
        batch = CommittedBatch(self.first_index, self.count, self.root, None)
        return Opening(self.nonce, self.vector_b64, self.index, batch, self.path)


_OPENINGS = TypeAdapter(list[_MemberOpening])


class FleetResults:
    """As ``PublishedResults``, from ``store``.

    Each lane of a round with roots is a committed round of its own. Its id is that of the member's
    round, which the callback with its roots names. A member that is a fleet has several in a lane.
    """

    def __init__(self, store: FleetStore, watch: FleetWatch, client: NewClient) -> None:
        self.results, self.winners = store.results, store.winners
        self.committed_round = store.committed_round
        self.probe, self.gauges = store.probe, store.gauges
        self._watch = watch
        self._client = client

    async def openings(self, committed: CommittedRound, nonces: Sequence[int]) -> list[Opening]:
        """As the port. Raises EngineFault if the member of the lane cannot be asked."""
        if not isinstance(committed, MemberRound):
            raise Refused(
                Refusal.UNKNOWN_ROUND, f"round {committed.round_id} is not one of this fleet"
            )
        condition = self._watch.current.by_id.get(committed.member_id)
        if condition is None:
            raise EngineFault(
                f"the vectors of round {committed.round_id} are gone with the member that had them"
            )
        member = condition.member
        work = committed.of.spec.work
        body = {
            "block_hash": work.block.hash,
            "public_key": work.public_key,
            "round_id": committed.round_id,
            "nonces": list(nonces),
        }
        try:
            answer = await self._client(member.url).job("/open", body)
            found = _OPENINGS.validate_python(answer["openings"])
            opened = {each.nonce: each.opening for each in found}
            return [opened[nonce] for nonce in nonces]
        except MemberError as error:
            if reason := _REASONS.get(error.status or 0):
                raise Refused(reason, str(error)) from error
            raise EngineFault(f"member {member.name}: {error}") from error
        except (ValidationError, KeyError) as error:
            raise EngineFault(f"member {member.name} answered nonsense to POST /open") from error
