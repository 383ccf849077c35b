"""The fleet's database behind one class. Each part of it has the methods about some tables."""

import asyncio
import time
from collections.abc import Callable
from typing import Self

from sqlalchemy import Connection

from proofserve.fleet.records import FleetRound, FleetView, Lane, MemberFindings
from proofserve.fleet.sql.batches import BatchStore, new_batch
from proofserve.fleet.sql.callbacks import DeliveryStore
from proofserve.fleet.sql.database import FleetDatabase, database_url, reads
from proofserve.fleet.sql.ingest import BatchWriter
from proofserve.fleet.sql.requests import RequestStore, queued_nonces
from proofserve.fleet.sql.rounds import RoundStore, lanes_where, read_desired
from proofserve.fleet.sql.tables import lanes
from proofserve.fleet.sql.verdicts import VerdictStore


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
