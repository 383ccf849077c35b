"""Lanes as rows. Every function runs inside a transaction of the caller."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, select, update

from proofserve.fleet.errors import LaneStillOpen, NoLaneLeft, RoundOver, UnknownLane, UnknownMember
from proofserve.fleet.records import FleetRound, Lane, LaneProgress
from proofserve.fleet.sql import rounds
from proofserve.fleet.sql.tables import lanes, members
from proofserve.fleet.sql.tables import rounds as rounds_table
from proofserve.fleet.sql.texts import kept

_LANE = (
    *(rounds_table.c.id, lanes.c.lane, lanes.c.member, lanes.c.given_at, lanes.c.member_round),
    *(lanes.c.started_at, lanes.c.ended_at, lanes.c.end_reason),
)
_OPEN = lanes.c.ended_at.is_(None)


def give(connection: Connection, round_id: str, member_id: str, now: float) -> Lane:
    """As ``FleetStore.give_lane``."""
    # Locks the round: two controllers give lanes of it one after the other.
    row = connection.execute(
        select(rounds_table).where(rounds_table.c.id == kept(round_id)).with_for_update()
    ).first()
    if row is None or row.ended_at is not None:
        raise RoundOver(f"round {round_id} has ended, so it gives no more lanes")
    is_member = select(members.c.id).where(
        members.c.id == kept(member_id), members.c.removed_at.is_(None)
    )
    if connection.execute(is_member).first() is None:
        raise UnknownMember(f"there is no member {member_id!r}")
    held = select(lanes.c.lane).where(
        lanes.c.round == row.number, lanes.c.member == member_id, _OPEN
    )
    if (lane := connection.execute(held).scalar()) is not None:
        raise LaneStillOpen(f"member {member_id} still has lane {lane} of round {round_id}")
    if row.given >= row.lanes:
        raise NoLaneLeft(
            f"round {round_id} has given all of its {row.lanes} lanes, and gives none twice:"
            " start the next round with more --lanes"
        )
    given = {"round": row.number, "lane": row.given, "lanes": row.lanes, "member": member_id}
    connection.execute(lanes.insert().values(**given, given_at=now))
    connection.execute(
        update(rounds_table)
        .where(rounds_table.c.number == row.number)
        .values(given=rounds_table.c.given + 1)
    )
    return Lane(row.id, row.given, member_id, now)


def start(connection: Connection, lane: Lane, member_round_id: str, now: float) -> None:
    _change(connection, lane, member_round=kept(member_round_id, 200), started_at=now)


def end(connection: Connection, lane: Lane, reason: str, now: float) -> None:
    found = _one(connection, lane.round_id, lane.lane)
    if found.ended_at is None:
        _change(connection, lane, ended_at=now, end_reason=kept(reason))


def end_all_of(connection: Connection, member_id: str, reason: str, now: float) -> None:
    ended = update(lanes).where(lanes.c.member == member_id, _OPEN)
    connection.execute(ended.values(ended_at=now, end_reason=kept(reason)))


def find(connection: Connection, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
    """Raises UnknownLane."""
    found = _one(connection, round_id, lane)
    of = rounds.find(connection, round_id)
    if of is None:
        raise _unknown(round_id, lane)
    return of, found


def progress(connection: Connection, round_number: int) -> list[LaneProgress]:
    counts = (lanes.c.batches, lanes.c.stored, lanes.c.last_stored_at)
    sampled = (lanes.c.sampled_at, lanes.c.sampled_batch, lanes.c.sampled_stored)
    chosen = (
        _joined(*_LANE, *counts, *sampled)
        .where(lanes.c.round == round_number)
        .order_by(lanes.c.lane)
    )
    return [
        LaneProgress(_lane(row[: len(_LANE)]), *row[len(_LANE) :])
        for row in connection.execute(chosen)
    ]


def of_round(connection: Connection, round_id: str) -> list[LaneProgress]:
    found = rounds.find(connection, round_id)
    return [] if found is None else progress(connection, found.number)


def open_ones(connection: Connection) -> list[Lane]:
    chosen = _joined(*_LANE).where(_OPEN).order_by(lanes.c.round, lanes.c.lane)
    return [_lane(row) for row in connection.execute(chosen)]


def _one(connection: Connection, round_id: str, lane: int) -> Lane:
    # A number from a URL may be larger than any column.
    chosen = _joined(*_LANE).where(rounds_table.c.id == kept(round_id), lanes.c.lane == lane)
    row = connection.execute(chosen).first() if 0 <= lane < rounds.MOST_LANES else None
    if row is None:
        raise _unknown(round_id, lane)
    return _lane(row)


def _change(connection: Connection, lane: Lane, **values: Any) -> None:
    number = (
        select(rounds_table.c.number).where(rounds_table.c.id == lane.round_id).scalar_subquery()
    )
    changed = connection.execute(
        update(lanes).where(lanes.c.round == number, lanes.c.lane == lane.lane).values(**values)
    )
    if not changed.rowcount:
        raise _unknown(lane.round_id, lane.lane)


def _joined(*columns: Any) -> Select[Any]:
    return select(*columns).join_from(lanes, rounds_table, rounds_table.c.number == lanes.c.round)


def _lane(row: Sequence[Any]) -> Lane:
    return Lane(*row)


def _unknown(round_id: str, lane: int) -> UnknownLane:
    return UnknownLane(f"round {round_id!r} has given no lane {lane}")
