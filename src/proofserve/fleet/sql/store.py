"""The fleet's database behind one class. Each part of it has the methods about some tables."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, bindparam, func, insert, select, tuple_, update

from proofserve.fleet.records import FleetRound, FleetView, Lane, MemberFindings, StoreUnavailable
from proofserve.fleet.sql.batches import BatchStore, NewBatch, add_roots, new_batch
from proofserve.fleet.sql.callbacks import DeliveryStore
from proofserve.fleet.sql.database import FleetDatabase, database_url
from proofserve.fleet.sql.requests import RequestStore, queued_nonces
from proofserve.fleet.sql.rounds import RoundStore, lanes_where, read_desired
from proofserve.fleet.sql.tables import batches, counters, deleted_spans, lanes, rounds
from proofserve.fleet.sql.verdicts import VerdictStore
from proofserve.outbox.database import StorePart, reads
from proofserve.rounds.errors import Refusal, Refused


class FleetStore(RoundStore, BatchStore, DeliveryStore):
    """Keeps the fleet in SQLite or PostgreSQL; made by ``open``, closes when its context is left.

    Every method raises StoreUnavailable if the database fails: nothing is changed then, and the
    store stays usable. Several stores may use one database, also from several machines. ``news`` is
    set when the sender of callbacks may have work.
    """

    def __init__(self, database: FleetDatabase, clock: Callable[[], float]) -> None:
        super().__init__(database, clock, asyncio.Event())
        self.verdicts = VerdictStore(database, clock, self.news)
        self.requests = RequestStore(database, clock, self.news)
        self._writer = BatchWriter(database, clock, self.news)

    @classmethod
    async def open(cls, url: str, clock: Callable[[], float] = time.time) -> Self:
        """Open the database and bring its tables to the present version.

        ``url`` is ``postgresql://...``, ``sqlite:///file`` or the path of an SQLite file.
        ``clock`` gives wall-clock seconds. Raises ValueError for another URL, and
        StoreUnavailable.
        """
        return cls(await FleetDatabase.open(database_url(url)), clock)

    async def close(self) -> None:
        """Store what waits and disconnect. A second call does nothing."""
        await self._writer.close()
        await self.database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def ingest(
        self, round_: FleetRound, lane: Lane, callback_key: str, found: MemberFindings
    ) -> bool:
        """Store what a member's callback found; on disk when this returns.

        ``callback_bodies.read`` makes ``found`` of a body. False: a callback of the lane with this
        key was stored before. A nonce that another callback of the lane has is not stored again.
        Raises ProtocolError for a nonce of another lane.
        """
        batch = await asyncio.to_thread(new_batch, round_, lane, callback_key, found)
        return await self._writer.add(batch)

    @reads
    def view(self, connection: Connection) -> FleetView:
        """Its size is bounded by MOST_MEMBERS, MOST_LANES and STATUS_BYTES."""
        desired = read_desired(connection)
        number = desired.round.number if desired.round else None
        given = lanes_where(connection, lanes.c.round == number)
        members, queued = tuple(self.listed(connection)), queued_nonces(connection)
        return FleetView(self.clock(), members, desired, tuple(given), queued)


# The most callbacks in one transaction, and the nonces after which no more are added.
_MOST = 256
_MOST_NONCES = 1_000_000


@dataclass(eq=False, repr=False)
class BatchWriter(StorePart[FleetDatabase]):
    """Collects callbacks while a transaction runs, and stores them with the next one, in order.

    A transaction costs a write to the disk. With one for each callback, a fleet of a thousand
    members would wait for the disk most of the time.
    """

    _waiting: deque[tuple[NewBatch, asyncio.Future[bool]]] = field(
        default_factory=deque, init=False
    )
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    async def add(self, batch: NewBatch) -> bool:
        """As ``FleetStore.ingest``. A cancelled call may still store the batch."""
        stored: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((batch, stored))
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return await stored

    async def close(self) -> None:
        """Store what waits."""
        if self._writing is not None:
            await asyncio.wait({self._writing})

    async def _write(self) -> None:
        try:
            while self._waiting:
                await self._write_group(self._next_group())
        finally:
            self._writing = None

    def _next_group(self) -> list[tuple[NewBatch, "asyncio.Future[bool]"]]:
        group: list[tuple[NewBatch, asyncio.Future[bool]]] = []
        nonces = 0
        while self._waiting and len(group) < _MOST and nonces < _MOST_NONCES:
            group.append(self._waiting.popleft())
            nonces += len(group[-1][0].nonces)
        return group

    async def _write_group(self, group: Sequence[tuple[NewBatch, "asyncio.Future[bool]"]]) -> None:
        try:
            chosen = [batch for batch, _ in group]
            outcomes, wakes = await self.database.write(add_all, chosen, self.clock())
        except BaseException as error:
            for _, stored in group:
                if not stored.done():
                    stored.set_exception(error)
            if isinstance(error, StoreUnavailable):
                # Later groups may succeed.
                return
            raise
        if wakes:
            self.news.set()
        for (_, stored), outcome in zip(group, outcomes, strict=True):
            if stored.done():
                # Its caller has gone.
                continue
            if isinstance(outcome, Refused):
                stored.set_exception(outcome)
            else:
                stored.set_result(outcome)


def add_all(
    connection: Connection, group: Sequence[NewBatch], now: float
) -> tuple[list[bool | Refused], bool]:
    """Store those of ``group`` that are new, under rising numbers.

    Returns whether each was new, or why it is not stored, and whether the sender has new work.
    """
    adding = _Adding(connection, group, now)
    return [adding.add(batch) for batch in group], adding.finish()


class _Adding:
    """One transaction that stores callbacks."""

    def __init__(self, connection: Connection, group: Sequence[NewBatch], now: float) -> None:
        self._connection = connection
        self._now = now
        # Other stores wait here until this transaction has ended. A reader that has seen a number
        # has therefore seen all smaller ones.
        last = connection.execute(select(counters).with_for_update()).one()
        self._last_batch, self._last_seq = last.last_batch, last.last_seq
        # The lanes of ``group``, and those of its keys that were stored before.
        place = (lanes.c.round, lanes.c.lane)
        places = {(each.round_number, each.lane) for each in group}
        found = select(*place, lanes.c.next_index).where(tuple_(*place).in_(places))
        self._next_index = {(row[0], row[1]): row[2] for row in connection.execute(found)}
        key = (batches.c.round, batches.c.lane, batches.c.callback_key)
        known = select(*key).where(tuple_(*key).in_([each.key for each in group]))
        self._keys = {tuple(row) for row in connection.execute(known)}
        self._rows: list[dict[str, Any]] = []
        self._advances: list[dict[str, Any]] = []
        # Of each round: the nonces added, and its last batch.
        self._rounds: dict[int, tuple[int, int]] = {}

    def add(self, batch: NewBatch) -> bool | Refused:
        place = (batch.round_number, batch.lane)
        next_index = self._next_index.get(place)
        if next_index is None:
            return Refused(
                Refusal.UNKNOWN_LANE, f"round {batch.round_number} has given no lane {batch.lane}"
            )
        if batch.key in self._keys:
            return False
        if len(batch.indices) and int(batch.indices.min()) < next_index:
            batch = batch.without(self._known_near(batch))
        add_roots(self._connection, batch)
        self._last_batch += 1
        row = batch.columns(self._last_batch, self._last_seq + 1, self._now)
        self._last_seq = row["last_seq"]
        self._rows.append(row)
        self._keys.add(batch.key)
        if row["count"]:
            next_index = max(next_index, row["last_index"] + 1)
            so_far, _ = self._rounds.get(batch.round_number, (0, 0))
            self._rounds[batch.round_number] = (so_far + row["count"], self._last_batch)
        self._next_index[place] = next_index
        added = {"more": row["count"], "next": next_index, "at": self._now}
        self._advances.append({"of_round": batch.round_number, "of_lane": batch.lane, **added})
        return True

    def finish(self) -> bool:
        """Write what was added. Returns whether the sender has new work."""
        self._flush()
        if self._advances:
            # In one order, so that no two transactions wait for each other.
            in_order = sorted(self._advances, key=itemgetter("of_round", "of_lane"))
            self._connection.execute(_ADVANCE_LANE, in_order)
        values = {"last_batch": self._last_batch, "last_seq": self._last_seq}
        self._connection.execute(update(counters).values(**values))
        changed = [
            {"of": number, "more": more, "last": last, "now": self._now}
            for number, (more, last) in sorted(self._rounds.items())
        ]
        if not changed:
            return False
        waits = select(func.count()).where(
            rounds.c.number.in_(self._rounds),
            rounds.c.url.is_not(None),
            rounds.c.ended_at.is_not(None) | (rounds.c.last_batch <= rounds.c.cut_batch),
        )
        wakes = self._connection.execute(waits).scalar_one() > 0
        self._connection.execute(_ADVANCE_ROUND, changed)
        return wakes

    def _known_near(self, batch: NewBatch) -> NDArray[np.int64]:
        """Nonces of the lane's other batches, stored or deleted, in the range of ``batch``."""
        self._flush()
        chosen = select(batches.c.nonces).where(
            batches.c.round == batch.round_number,
            batches.c.lane == batch.lane,
            batches.c.last_index >= int(batch.indices.min()),
            batches.c.first_index < int(batch.ends.max()),
        )
        stored = b"".join(row.nonces for row in self._connection.execute(chosen))
        known = [np.frombuffer(stored, "<i8").astype(np.int64)]
        spans = select(deleted_spans.c.first_index, deleted_spans.c.end_index).where(
            deleted_spans.c.round == batch.round_number, deleted_spans.c.lane == batch.lane
        )
        for first, end in self._connection.execute(spans):
            known.append(batch.nonces[(batch.indices >= first) & (batch.indices < end)])
        return np.concatenate(known)

    def _flush(self) -> None:
        if self._rows:
            self._connection.execute(insert(batches), self._rows)
            self._rows = []


_ADVANCE_LANE = (
    update(lanes)
    .where(lanes.c.round == bindparam("of_round"), lanes.c.lane == bindparam("of_lane"))
    .values(
        batches=lanes.c.batches + 1,
        stored=lanes.c.stored + bindparam("more"),
        next_index=bindparam("next"),
        last_stored_at=bindparam("at"),
    )
)
_ADVANCE_ROUND = (
    update(rounds)
    .where(rounds.c.number == bindparam("of"))
    .values(
        stored=rounds.c.stored + bindparam("more"),
        last_batch=bindparam("last"),
        interval_from=func.coalesce(rounds.c.interval_from, bindparam("now")),
    )
)
