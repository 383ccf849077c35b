"""The fleet's database behind one class."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from proofserve.fleet.records import (
    Desired,
    FleetRound,
    FleetView,
    Lane,
    LaneProgress,
    Member,
    MemberFindings,
    MemberSource,
    Seen,
    Wish,
)
from proofserve.outbox.deliveries import Delivery
from proofserve.outbox.schedule import CallbackPolicy, SendPlan
from proofserve.rounds.records import (
    CompletedJob,
    DistanceVerdict,
    RoundSpec,
    StoredResult,
    Winner,
)
from proofserve.rounds.state import Move
from proofserve.rounds.status import OutboxGauges


class FleetStore:
    """Keeps the fleet in SQLite or PostgreSQL; made by ``open``, closes when its context is left.

    Every method raises StoreUnavailable if the database fails: nothing is changed then, and the
    store stays usable. Several stores may use one database, also from several machines. ``news`` is
    set when the sender of callbacks may have work.
    """

    news: asyncio.Event

    @classmethod
    async def open(cls, url: str, clock: Callable[[], float] = time.time) -> Self:
        """Open the database and bring its tables to the present version.

        ``url`` is ``postgresql://...``, ``sqlite:///file`` or the path of an SQLite file.
        ``clock`` gives wall-clock seconds. Raises ValueError for another URL, NewerDatabase and
        StoreUnavailable.
        """
        ...

    async def close(self) -> None: ...

    # Members.

    async def members(self) -> list[Member]:
        """The members that were not removed, by name."""
        ...

    async def put_member(self, url: str, name: str, source: MemberSource) -> Member:
        """The member with this URL: a new one, or the known one with this name and source.

        A member that was removed comes back with its id, active. Raises FleetFull.
        """
        ...

    async def remove_member(self, member_id: str, reason: str = "the member was removed") -> None:
        """Forget a member and end its lanes. Its results stay. Raises UnknownMember."""
        ...

    async def wish(self, member_id: str, wish: Wish, reason: str | None) -> Member:
        """Store what the operator wants of a member. Raises UnknownMember."""
        ...

    async def seen(self, reports: Mapping[str, Seen]) -> None:
        """Store the last looks, by member id, in one transaction. Ids without a member are ignored.

        A ``status`` above STATUS_BYTES of JSON is left out.
        """
        ...

    # The desired state.

    async def desired(self) -> Desired: ...

    async def open_round(self, spec: RoundSpec, lanes: int, move: Move = Move.START) -> FleetRound:
        """Configure ``spec`` by one of the moves INIT, START and INIT_VALIDATE.

        Any other round is ended. Legality is decided within the transaction, so that one of two
        controllers wins. Raises what ``rounds.state.step`` raises, LaneUnset (START of a spec
        without a lane) and ValueError (``lanes`` outside 1..MOST_LANES, or a known round id).
        """
        ...

    async def move(self, move: Move) -> Desired:
        """Apply GENERATE, VALIDATE or STOP to the configured round; returns the new desired state.

        Raises what ``rounds.state.step`` raises, and LaneUnset for GENERATE without a lane.
        """
        ...

    async def round(self, round_id: str) -> FleetRound | None: ...

    async def rounds_of_block(self, block_hash: str, public_key: str) -> list[FleetRound]:
        """The rounds of a block and key, in the order of their start."""
        ...

    # Lanes.

    async def give_lane(self, round_id: str, member_id: str) -> Lane:
        """Give the next lane of the round, once and for ever.

        Raises NoLaneLeft, LaneStillOpen (the member has a lane of this round that was not ended),
        RoundOver (the round is stopped or replaced, or there is none) and UnknownMember.
        """
        ...

    async def lane_started(self, lane: Lane, member_round_id: str) -> None:
        """Note the member's id of its round. Raises UnknownLane."""
        ...

    async def end_lane(self, lane: Lane, reason: str) -> None:
        """End a lane; no change if it was ended before. Late callbacks of it are still stored.

        Raises UnknownLane.
        """
        ...

    async def lane(self, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
        """The round and its lane of this number. Raises UnknownLane."""
        ...

    async def lanes(self, round_id: str) -> list[LaneProgress]:
        """The given lanes of a round, by number."""
        ...

    async def open_lanes(self) -> list[Lane]:
        """The lanes of all rounds that were not ended, oldest first."""
        ...

    # Results.

    async def ingest(
        self, round_: FleetRound, lane: Lane, callback_key: str, found: MemberFindings
    ) -> bool:
        """Store what a member's callback found; on disk when this returns.

        ``callback_reader.read`` makes ``found`` of a body. False: a callback of the lane with this
        key was stored before. A nonce that another callback of the lane has is not stored again.
        Raises BadCallback for a nonce of another lane.
        """
        ...

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        """Results with a seq above ``after``, by seq. No smaller seq appears later."""
        ...

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        """The newest ``limit`` winners of a round, oldest first."""
        ...

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        """Queue the callback about a job or a verdict to ``url``."""
        ...

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback, due at once. Raises ValueError for a body that is not JSON."""
        ...

    async def probe(self) -> None:
        """Write and roll back."""
        ...

    async def gauges(self) -> OutboxGauges: ...

    # What outbox.sender.CallbackSender needs.

    async def plan(
        self, policy: CallbackPolicy, busy: frozenset[str] = frozenset(), flushing: bool = False
    ) -> SendPlan:
        """The callbacks to post now, at most one for each URL, in the order of their sequence."""
        ...

    async def body(self, delivery: Delivery) -> bytes: ...

    async def acknowledge(self, delivery: Delivery) -> None: ...

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``; None makes it expire."""
        ...

    # All at once.

    async def view(self) -> FleetView:
        """Members, the desired state and the lanes of its round, from one snapshot."""
        ...
