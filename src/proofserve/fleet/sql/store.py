"""The fleet's database behind one class."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Self

from sqlalchemy import Connection

from proofserve.fleet.records import (
    Desired,
    FleetRound,
    FleetView,
    Lane,
    LaneProgress,
    Member,
    MemberFindings,
    MemberSource,
    RootsOfRound,
    Seen,
    Served,
    Wish,
)
from proofserve.fleet.sql import address, lanes, members, rounds, view
from proofserve.fleet.sql.batches import deletion, results, roots
from proofserve.fleet.sql.batches.ingest import BatchWriter
from proofserve.fleet.sql.batches.new_batch import new_batch
from proofserve.fleet.sql.callbacks import deliveries, payload, schedule
from proofserve.fleet.sql.database import FleetDatabase, P, T
from proofserve.fleet.sql.requests.store import RequestStore
from proofserve.fleet.sql.verdicts.store import VerdictStore
from proofserve.outbox.callbacks import CallbackPolicy, Delivery, SendPlan, callback_text
from proofserve.rounds.errors import Refused
from proofserve.rounds.records import CompletedJob, DistanceVerdict, RoundSpec, StoredResult, Winner
from proofserve.rounds.state import Move
from proofserve.rounds.status import OutboxGauges
from proofserve.wire.callbacks import callback


class FleetStore:
    """Keeps the fleet in SQLite or PostgreSQL; made by ``open``, closes when its context is left.

    Every method raises StoreUnavailable if the database fails: nothing is changed then, and the
    store stays usable. Several stores may use one database, also from several machines. ``news`` is
    set when the sender of callbacks may have work.
    """

    def __init__(self, database: FleetDatabase, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self.news = asyncio.Event()
        self._writer = BatchWriter(database, clock, self.news)
        self._failed_attempts = 0
        self._looks = members.KnownLooks()
        self.verdicts = VerdictStore(database, clock, self.news.set)
        self.requests = RequestStore(database, clock, self.news.set)

    @classmethod
    async def open(cls, url: str, clock: Callable[[], float] = time.time) -> Self:
        """Open the database and bring its tables to the present version.

        ``url`` is ``postgresql://...``, ``sqlite:///file`` or the path of an SQLite file.
        ``clock`` gives wall-clock seconds. Raises ValueError for another URL, NewerDatabase and
        StoreUnavailable.
        """
        return cls(await FleetDatabase.open(address.parse(url)), clock)

    async def close(self) -> None:
        """Store what waits and disconnect. A second call does nothing."""
        await self._writer.close()
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # Members.

    async def members(self) -> list[Member]:
        """The members that were not removed, by name."""
        return await self._database.read(self._looks.listed)

    async def put_member(self, url: str, name: str, source: MemberSource) -> Member:
        """The member with this URL: a new one, or the known one with this name and source.

        A member that was removed comes back with its id, active. Raises FleetFull.
        """
        return await self._database.write(members.put, url, name, source, self._clock())

    async def remove_member(self, member_id: str, reason: str = "the member was removed") -> None:
        """Forget a member and end its lanes. Its results stay. Raises UnknownMember."""
        await self._database.write(members.remove, member_id, reason, self._clock())

    async def wish(self, member_id: str, wish: Wish, reason: str | None) -> Member:
        """Store what the operator wants of a member. Raises UnknownMember."""
        return await self._database.write(members.wish, member_id, wish, reason)

    async def seen(self, reports: Mapping[str, Seen]) -> None:
        """Store the last looks, by member id, in one transaction. Ids without a member are ignored.

        A ``status`` above STATUS_BYTES of JSON is left out.
        """
        await self._database.write(members.add_seen, reports)

    # The desired state.

    async def desired(self) -> Desired:
        return await self._database.read(rounds.read)

    async def open_round(self, spec: RoundSpec, lanes: int, move: Move = Move.START) -> FleetRound:
        """Configure ``spec`` by one of the moves INIT, START and INIT_VALIDATE.

        Any other round is ended. Legality is decided within the transaction, so that one of two
        controllers wins. Raises what ``rounds.state.step`` raises, LaneUnset (START of a spec
        without a lane) and ValueError (``lanes`` outside 1..MOST_LANES, or a known round id).
        """
        return await self._announce(rounds.open_one, spec, lanes, move, self._clock())

    async def move(self, move: Move) -> Desired:
        """Apply GENERATE, VALIDATE or STOP to the configured round; returns the new desired state.

        Raises what ``rounds.state.step`` raises, and LaneUnset for GENERATE without a lane.
        """
        return await self._announce(rounds.move, move, self._clock())

    async def round(self, round_id: str) -> FleetRound | None:
        return await self._database.read(rounds.find, round_id)

    async def rounds_of_block(self, block_hash: str, public_key: str) -> list[FleetRound]:
        """The rounds of a block and key, in the order of their start."""
        return await self._database.read(rounds.of_block, block_hash, public_key)

    # Lanes.

    async def give_lane(self, round_id: str, member_id: str) -> Lane:
        """Give the next lane of the round, once and for ever; what is served is not known.

        Raises NoLaneLeft, LaneStillOpen (the member has a lane of this round that was not ended),
        RoundOver (the round is stopped or replaced, or there is none) and UnknownMember.
        """
        (found,) = await self.give_lanes(round_id, [member_id], Served())
        if isinstance(found, Refused):
            raise found
        return found

    async def give_lanes(
        self, round_id: str, member_ids: Sequence[str], served: Served
    ) -> list[Lane | Refused]:
        """A lane for each of ``member_ids``, or why it gets none, in one transaction.

        ``served`` is what the fleet serves now. Raises RoundOver.
        """
        return await self._database.write(lanes.give, round_id, member_ids, served, self._clock())

    async def lane_started(self, lane: Lane, member_round_id: str) -> None:
        """Note the member's id of its round. Raises UnknownLane."""
        await self.note_lanes({lane: member_round_id}, {})

    async def end_lane(self, lane: Lane, reason: str) -> None:
        """End a lane; no change if it was ended before. Late callbacks of it are still stored.

        Raises UnknownLane.
        """
        await self.note_lanes({}, {lane: reason})

    async def note_lanes(self, started: Mapping[Lane, str], ended: Mapping[Lane, str]) -> None:
        """Note members' ids of their rounds, and why lanes ended, in one transaction.

        Raises UnknownLane, and notes nothing then.
        """
        await self._database.write(lanes.note, started, ended, self._clock())

    async def lane(self, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
        """The round and its lane of this number. Raises UnknownLane."""
        return await self._database.read(lanes.find, round_id, lane)

    async def lanes(self, round_id: str) -> list[LaneProgress]:
        """The given lanes of a round, by number."""
        return await self._database.read(lanes.of_round, round_id)

    async def open_lanes(self) -> list[Lane]:
        """The lanes of all rounds that were not ended, oldest first."""
        return await self._database.read(lanes.open_ones)

    # Results.

    async def ingest(
        self, round_: FleetRound, lane: Lane, callback_key: str, found: MemberFindings
    ) -> bool:
        """Store what a member's callback found; on disk when this returns.

        ``callback_reader.read`` makes ``found`` of a body. False: a callback of the lane with this
        key was stored before. A nonce that another callback of the lane has is not stored again.
        Raises BadCallback for a nonce of another lane.
        """
        batch = await asyncio.to_thread(new_batch, round_, lane, callback_key, found)
        return await self._writer.add(batch)

    async def results(self, after: int, limit: int) -> list[StoredResult]:
        """Results with a seq above ``after``, by seq. No smaller seq appears later."""
        return await self._database.read(results.after, after, limit)

    async def roots(self, of: Sequence[FleetRound], round_id: str | None) -> list[RootsOfRound]:
        """The members' rounds with roots, of the fleet's rounds ``of``; with an id only that."""
        return await self._database.read(roots.find, of, round_id)

    async def delete_delivered(self, older_than_s: float) -> bool:
        """Delete a part of what was delivered so long ago; False if there was nothing to delete.

        A reader of ``results`` sees a gap then; no seq is used again.
        """
        return await self._database.write(deletion.step, self._clock() - older_than_s)

    async def winners(self, round_id: str, limit: int) -> list[Winner]:
        """The newest ``limit`` winners of a round, oldest first."""
        return await self._database.read(results.newest_winners, round_id, limit)

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        """Queue the callback about a job or a verdict to ``url``."""
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    async def enqueue(self, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback, due at once. Raises ValueError for a body that is not JSON."""
        text = callback_text(endpoint, body)
        await self._announce(deliveries.add_body, endpoint, url, text, self._clock())

    async def probe(self) -> None:
        """Write and roll back."""
        await self._database.write(rounds.touch)

    async def gauges(self) -> OutboxGauges:
        read = await self._database.read(deliveries.gauges, self._clock())
        return replace(read, failed_attempts=self._failed_attempts)

    # What outbox.sender.CallbackSender needs.

    async def plan(
        self, policy: CallbackPolicy, busy: frozenset[str] = frozenset(), flushing: bool = False
    ) -> SendPlan:
        """The callbacks to post now, at most one for each URL, in the order of their sequence."""
        return await self._database.write(schedule.plan, policy, busy, flushing, self._clock())

    async def body(self, delivery: Delivery) -> bytes:
        return await payload.body(self._database, delivery)

    async def acknowledge(self, delivery: Delivery) -> None:
        await self._database.write(deliveries.acknowledge, delivery, self._clock())

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``; None makes it expire."""
        await self._database.write(deliveries.fail, delivery, error, pause_s, self._clock())
        self._failed_attempts += 1

    # All at once.

    async def view(self) -> FleetView:
        """Members, the desired state and the lanes of its round, from one snapshot."""
        return await self._database.read(view.read, self._looks, self._clock())

    async def _announce(
        self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Write and wake the sender, also after an error: the rows may be stored nevertheless."""
        try:
            return await self._database.write(work, *args, **kwargs)
        finally:
            self.news.set()
