"""One look at all that controllers decide by. It runs inside a transaction of the caller."""

from sqlalchemy import Connection

from proofserve.fleet.records import FleetView
from proofserve.fleet.sql import lanes, members, rounds


def read(connection: Connection, now: float) -> FleetView:
    """Its size is bounded by MOST_MEMBERS, MOST_LANES and the size of each look."""
    desired = rounds.read(connection)
    given = lanes.progress(connection, desired.round.number) if desired.round else []
    return FleetView(now, tuple(members.listed(connection)), desired, tuple(given))
