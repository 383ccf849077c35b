"""One look at all that controllers decide by. It runs inside a transaction of the caller."""

from sqlalchemy import Connection

from proofserve.fleet.records import FleetView
from proofserve.fleet.sql import lanes, rounds
from proofserve.fleet.sql.members import KnownLooks
from proofserve.fleet.sql.requests.rows import queued_nonces


def read(connection: Connection, looks: KnownLooks, now: float) -> FleetView:
    """Its size is bounded by MOST_MEMBERS, MOST_LANES and the size of each look."""
    desired = rounds.read(connection)
    given = lanes.progress(connection, desired.round.number) if desired.round else []
    members, queued = tuple(looks.listed(connection)), queued_nonces(connection)
    return FleetView(now, members, desired, tuple(given), queued)
