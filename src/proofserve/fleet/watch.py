"""The fleet as this process knows it: the database as it was a moment ago, and what follows."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata

from proofserve.api.node import Deployment
from proofserve.fleet.members import MemberCondition, Rules, conditions, lanes_left
from proofserve.fleet.records import DesiredState, FleetView, Lane, MemberState, StoreUnavailable
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import VerificationView
from proofserve.protocol.scheme import AllowedTokens, ModelFacts
from proofserve.rounds.records import EngineInfo
from proofserve.rounds.state import State
from proofserve.rounds.status import LaneUse, RoundStats

_logger = logging.getLogger(__name__)

_LEAST_TOKENS = 2
# Between two readings of the database, seconds.
_INTERVAL_S = 1.0

# Nonces with a result, and those without one, as the member of a lane counts them: by the id of the
# round and the number of the lane.
MemberCounts = Mapping[tuple[str, int], tuple[int, int]]


@dataclass(frozen=True)
class Overview:
    """One look at the database, and what each member is by it.

    ``lanes`` holds all lanes of the desired round, and those of earlier rounds that are still open.
    ``counted`` is what members have counted of their lanes of the desired round.
    """

    view: FleetView
    members: tuple[MemberCondition, ...]
    lanes: tuple[Lane, ...]
    deployment: Deployment | None
    verification: VerificationView = field(default_factory=VerificationView)
    counted: MemberCounts = field(default_factory=dict)

    @property
    def desired(self) -> DesiredState:
        return self.view.desired

    @property
    def served(self) -> tuple[str | None, str | None]:
        """The digest of the weights and the model's name, as most members say."""
        if self.deployment is None:
            return None, None
        info = self.deployment.engine_info
        return info.facts.weights_digest, next(iter(info.model_names), None)

    @cached_property
    def by_id(self) -> Mapping[str, MemberCondition]:
        return {each.member.id: each for each in self.members}

    @cached_property
    def newest(self) -> Mapping[str, Lane]:
        """The newest lane of the desired round by member, ended or not."""
        # Lanes are given in the order of their numbers.
        return {each.member_id: each for each in self.view.lanes}

    @property
    def ready(self) -> tuple[MemberCondition, ...]:
        return tuple(each for each in self.members if each.is_ready)

    @property
    def why_not_ready(self) -> str | None:
        """Why the fleet can prove nothing, with the reasons of its members; None if it can."""
        if self.ready:
            return None
        if not self.members:
            return "the fleet has no member: name some with --member, --members-file or --dns"
        first = [f"{each.member.name} is {each.state}: {each.reason}" for each in self.members[:3]]
        more = f"; and {len(self.members) - 3} more" if len(self.members) > 3 else ""
        return f"no member of the fleet is ready. {'; '.join(first)}{more}"

    @property
    def proving(self) -> list[MemberCondition]:
        """The members that generate the desired round's lane that they have."""
        if self.desired.state is not State.GENERATING:
            return []
        return [
            each
            for each in self.members
            if each.generates and each.status is not None
            if (lane := self.newest.get(each.member.id)) is not None and lane.ended_at is None
            if lane.member_round_id == each.status.round_id
        ]

    @property
    def paused_reason(self) -> str | None:
        """Why a running round makes no progress; None if at least one member does."""
        if self.desired.state is not State.GENERATING or self.desired.round is None:
            return None
        if reason := self.why_not_ready:
            return reason
        running = self.proving
        reasons = [f"{e.member.name}: {e.status.paused_reason}" for e in running if e.status]
        if any(e.status and e.status.paused_reason is None for e in running):
            return None
        if reasons:
            return "; ".join(reasons[:3])
        if not lanes_left(self.desired.round, self.lanes):
            return (
                f"all {self.desired.round.lanes} lanes of the round were given to members that"
                " prove them no more: start the next round with more --lanes"
            )
        return "no member has started its lane yet"

    def processed(self, lane: Lane) -> int:
        """Nonces of a lane with a result.

        Of artifacts only those that the fleet has stored count. In a round of the distance protocol
        most nonces leave nothing to store: there the member's own count is used.
        """
        round_ = self.desired.round
        if round_ is None or round_.spec.target is None:
            return lane.stored
        done, _ = self.counted.get((lane.round_id, lane.lane), (0, 0))
        return max(lane.stored, done)

    @property
    def lane_use(self) -> LaneUse | None:
        round_ = self.desired.round
        if round_ is None or not round_.lanes:
            return None
        return LaneUse(round_.lanes, {each.lane: self.processed(each) for each in self.view.lanes})

    def round_stats(self, now: float) -> RoundStats | None:
        """The counters of the desired round, None without one. ``now`` in wall-clock seconds."""
        round_ = self.desired.round
        if round_ is None:
            return None
        done = sum(self.processed(each) for each in self.view.lanes)
        elapsed_s = max(0.0, (round_.ended_at or now) - round_.opened_at)
        theirs = [e.status.stats for e in self.proving if e.status and e.status.stats]
        return RoundStats(
            total_processed=done,
            total_found=sum(each.stored for each in self.view.lanes),
            failed=sum(failed for _, failed in self.counted.values()),
            elapsed_s=elapsed_s,
            nonces_per_second=done / elapsed_s if elapsed_s else 0.0,
            recent_nonces_per_second=sum(each.recent_nonces_per_second for each in theirs),
            deferred_calls=sum(each.deferred_calls for each in theirs),
            deferred_s=sum(each.deferred_s for each in theirs),
            faults=sum(each.faults for each in theirs),
        )

    def reason_of(self, condition: MemberCondition) -> str | None:
        """What an operator should know of a member: why it is kept out, or takes no part."""
        status = condition.status
        if condition.state is MemberState.DRAINING and status and status.outbox:
            pending = status.outbox.pending
            left = f"{pending} callbacks to deliver" if pending else "nothing is left"
            return f"{condition.reason} ({left})"
        if condition.reason or status is None:
            return condition.reason
        outbox = status.outbox
        if (why := self._why_no_lane(condition)) or outbox is None:
            return why or status.paused_reason
        if outbox.last_error and outbox.pending:
            return f"its callbacks fail: {outbox.last_error}"
        if outbox.expired:
            return (
                f"{outbox.expired} of its callbacks have expired: run `proofserve outbox retry"
                " --expired` there, and give it POC_CALLBACK_MAX_RETRIES=0"
            )
        return status.paused_reason

    def _why_no_lane(self, condition: MemberCondition) -> str | None:
        """Why a ready member has no lane of the running round."""
        lane, desired = self.newest.get(condition.member.id), self.desired
        if desired.state is not State.GENERATING or desired.round is None:
            return None
        if lane is not None and lane.ended_at is None:
            return None
        if not lanes_left(desired.round, self.lanes):
            return f"no lane is left of the round's {desired.round.lanes}"
        return f"its last lane ended: {lane.end_reason}" if lane else None


@dataclass(eq=False, repr=False)
class FleetWatch:
    """Reads the database each second while ``run`` runs.

    ``limits`` has the fleet's own limits of requests. ``clock`` gives wall-clock seconds.
    """

    _store: FleetStore
    _rules: Rules
    limits: Deployment
    clock: Callable[[], float] = time.time
    error: str | None = field(default=None, init=False)
    """Why the database could not be read the last time; None if it could."""
    current: Overview = Overview(FleetView(0.0, (), DesiredState(), ()), (), (), None)
    _version: str = field(default_factory=partial(metadata.version, "proofserve"), init=False)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _read_at: float = field(default_factory=time.monotonic, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def age_s(self) -> float:
        """Seconds since the database was read."""
        return time.monotonic() - self._read_at

    async def refresh(self) -> Overview:
        """Read the database now. Raises StoreUnavailable."""
        async with self._reading:
            began = time.monotonic()
            try:
                view, open_lanes = await self._store.view(), await self._store.open_lanes()
                verification = await self._store.verdicts.view()
            except StoreUnavailable as error:
                self.error = str(error)
                raise
            self.error, self._read_at = None, began
            known = {(lane.round_id, lane.lane): lane for lane in (*open_lanes, *view.lanes)}
            lanes = tuple(known.values())
            found = conditions(view.members, view.desired, lanes, self._rules, self.clock())
            deployment = fleet_deployment(found, self.limits, self._version)
            counted = _counts(view, found, self.current.counted)
            self.current = Overview(view, found, lanes, deployment, verification, counted)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            return self.current

    async def next_change(self) -> None:
        """Wait until the database was read again."""
        await self._changed.wait()

    async def run(self) -> None:
        """Read until cancelled, unless another call has just read."""
        while True:
            if (left_s := _INTERVAL_S - self.age_s) > 0.0:
                await asyncio.sleep(left_s)
                continue
            try:
                await self.refresh()
            except StoreUnavailable as error:
                _logger.warning("the fleet's database cannot be read: %s", error)
            except Exception:
                self.error = "the database holds what this controller cannot read"
                _logger.exception("the fleet's database cannot be read")
            await asyncio.sleep(_INTERVAL_S)


def _counts(
    view: FleetView, found: Sequence[MemberCondition], before: MemberCounts
) -> MemberCounts:
    """What the members of the desired round's lanes have counted.

    A member that was restarted without its round counts anew: then ``before`` stays.
    """
    statuses = {each.member.id: each.status for each in found}
    counted = {}
    for lane in view.lanes:
        place = (lane.round_id, lane.lane)
        done, failed = before.get(place, (0, 0))
        status = statuses.get(lane.member_id)
        stats = status.stats if status else None
        if status and stats and status.round_id and status.round_id == lane.member_round_id:
            done, failed = max(done, stats.total_processed), max(failed, stats.failed)
        counted[place] = (done, failed)
    return counted


def fleet_deployment(
    found: Sequence[MemberCondition], limits: Deployment, version: str
) -> Deployment | None:
    """What every member that is not refused can do; None before the first one has answered.

    A fixed scheme, seq_len or k_dim is the same on all of them, because unequal ones are refused.
    """
    deployed = [
        each.deployment
        for each in sorted(found, key=lambda each: (each.member.added_at, each.member.id))
        if each.state is not MemberState.REFUSED and each.deployment is not None
    ]
    if not deployed:
        return None
    first = deployed[0]
    # The names under which every member serves the model, in the order of the first one.
    names = tuple(name for name in first.models if all(name in each.models for each in deployed))
    # Only the number of token ids counts here: members draw prompts, the fleet does not.
    count = min(each.token_ids for each in deployed)
    tokens = AllowedTokens(((0, count),)) if count >= _LEAST_TOKENS else None
    info = EngineInfo(
        model_names=names,
        facts=ModelFacts(first.hidden_size, first.weights_digest, tokens),
        max_seq_len=min(each.max_seq_len for each in deployed),
        versions={**first.versions, "proofserve": version},
    )
    return replace(
        limits, engine_info=info, scheme=first.scheme, seq_len=first.seq_len, k_dim=first.k_dim
    )
