"""The rounds and jobs of a fleet, for the routes of a node."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from proofserve.fleet import reasons, summary
from proofserve.fleet.jobs.engine import FleetEngine, NewClient
from proofserve.fleet.jobs.stored import FleetJobs
from proofserve.fleet.reconciling.plan import START_LOST_S
from proofserve.fleet.records import FleetRound, Lane
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.summary import Counted
from proofserve.fleet.watch import FleetWatch, Overview
from proofserve.protocol.errors import ProtocolError
from proofserve.rounds.computation import ChunkDeadline, Computation, Judging
from proofserve.rounds.errors import NotInitialised, ShuttingDown
from proofserve.rounds.limits import Limits
from proofserve.rounds.prover import lane_of
from proofserve.rounds.records import (
    DistanceClaims,
    DistanceVerdict,
    Job,
    JobView,
    Outcome,
    RoundSpec,
)
from proofserve.rounds.state import Configured, Move, State, step
from proofserve.rounds.status import EngineGauges, NodeTotals, Status

# How often a call that waits for the members looks again, seconds.
_LOOK_AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class FleetLimits:
    """``lanes`` of each round; how long a start waits for the members, and a stop for results.

    Times in seconds. The members go on starting, or delivering, when the wait is over.
    """

    lanes: int = 64
    start_wait_s: float = 3.0
    stop_wait_s: float = 10.0
    node: Limits = field(default_factory=Limits)


class FleetManager:
    """A ``NodeManager`` over all members: it stores what is desired, and ``wake`` has it done.

    ``client`` makes the client of a member's URL. ``clock`` gives wall-clock seconds.
    """

    def __init__(
        self,
        store: FleetStore,
        watch: FleetWatch,
        client: NewClient,
        wake: Callable[[], None],
        limits: FleetLimits,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._watch = watch
        self._wake = wake
        self._limits = limits
        self._clock = clock
        self.totals = NodeTotals()
        self._closing = False
        self._counted: Counted = {}
        self._no_round = asyncio.Event()
        self._no_round.set()
        self._engine = FleetEngine(watch, client, self._no_round)
        jobs = limits.node.jobs
        deadline = ChunkDeadline(jobs.chunk_timeout_s, time.monotonic)
        computation = Computation(self._engine, self._no_round, deadline, self.totals)
        self.jobs = FleetJobs(store.requests, watch, self._engine, computation, jobs)
        self._judging = Judging(self._engine, self.jobs.admission, deadline, self.totals)

    async def follow(self) -> None:
        """Follow the database until cancelled: another controller may have started a round."""
        while True:
            self._follow(self._watch.current)
            await self._watch.next_change()

    async def init(self, spec: RoundSpec) -> None:
        await self._open(spec, Move.INIT)

    async def init_validate(self, spec: RoundSpec) -> None:
        await self._open(spec, Move.INIT_VALIDATE)
        await self._until(_settled, self._limits.stop_wait_s)

    async def start(self, spec: RoundSpec) -> None:
        """As the port. Also raises ProtocolError for a lane that is too short to be divided."""
        _require_room(spec, self._limits.lanes)
        await self._open(spec, Move.START)
        await self._until(_all_started, self._limits.start_wait_s)

    async def generate(self) -> None:
        await self._move(Move.GENERATE)
        await self._until(_all_started, self._limits.start_wait_s)

    async def validate(self) -> None:
        await self._move(Move.VALIDATE)
        await self._until(_settled, self._limits.stop_wait_s)

    async def judge(self, claims: DistanceClaims, of_round: bool = True) -> DistanceVerdict:
        self.require_open()
        desired = (await self._watch.refresh()).desired
        step(desired.state, Move.JUDGE, _kind(desired.round))
        if desired.round is None or desired.round.spec.target is None:
            raise NotInitialised("No round configured")
        spec, target = desired.round.spec, desired.round.spec.target
        wide = replace(spec, batch_size=max(spec.batch_size, self._engine.nonces_of_call))
        verdict = await self._judging.run(wide, target, claims)
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
            stats=summary.round_stats(overview, self._counted, self._clock()),
            paused_reason=reasons.paused_reason(overview),
            error=None,
            queue=self.jobs.gauges,
            lanes=summary.lane_use(overview, self._counted),
        )

    @property
    def counted(self) -> Counted:
        """What members have counted of their lanes of the desired round."""
        return self._counted

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

    @property
    def is_closing(self) -> bool:
        return self._closing

    def require_open(self) -> None:
        if self._closing:
            raise ShuttingDown("the server is shutting down; ask again after its restart")

    async def aclose(self) -> None:
        """Refuse new work. Rounds and jobs go on: another controller, or the next start, leads."""
        self._closing = True

    async def _open(self, spec: RoundSpec, move: Move) -> None:
        self.require_open()
        await self._store.open_round(spec, self._limits.lanes, move)
        await self._changed()

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
        self._counted = summary.counts_of(overview, self._counted)
        if overview.desired.state is State.GENERATING:
            self._no_round.clear()
        else:
            self._no_round.set()


def _require_room(spec: RoundSpec, lanes: int) -> None:
    """Raises LaneUnset, and ProtocolError if ``lanes`` lanes have less than one batch each."""
    lane_of(spec)
    whole = FleetRound(0, spec, lanes, 0.0, None)
    try:
        whole.nonces_of(lanes - 1).batch(0, spec.batch_size)
    except ProtocolError:
        raise ProtocolError(
            "node_count", f"divided into {lanes} lanes, this server has less than a batch of nonces"
        ) from None


def _kind(configured: FleetRound | None) -> Configured:
    if configured is None:
        return Configured.NOTHING
    return Configured.ARTIFACT if configured.spec.target is None else Configured.DISTANCE


def _is_starting(lane: Lane, now: float) -> bool:
    """Whether a start call of the lane may still be on its way."""
    known = lane.ended_at is not None or lane.member_round_id is not None
    return not known and now - lane.given_at < START_LOST_S


def _all_started(overview: Overview) -> bool:
    """Whether each ready member has a lane with a known round, or one that failed."""
    own = {each.lane.member_id: each.lane for each in overview.view.lanes}
    lanes = [own.get(each.member.id) for each in overview.ready]
    generating = {each.member.id for each in summary.proving(overview)}
    return all(
        lane is not None and (lane.member_id in generating or lane.ended_at is not None)
        for lane in lanes
    )


def _settled(overview: Overview) -> bool:
    """Whether no member generates for the fleet, and all that they found is stored here."""
    at = overview.view.at
    if any(_is_starting(each.lane, at) for each in overview.view.lanes):
        return False
    for condition in overview.members:
        status = condition.status
        if not condition.answered or status is None:
            continue
        own = [e for e in overview.view.lanes if e.lane.member_id == condition.member.id]
        for each in own:
            if each.lane.member_round_id != status.round_id:
                continue
            found = status.stats.total_found if status.stats else 0
            if status.generates or each.stored < found:
                return False
    return True
