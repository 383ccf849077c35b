"""Lanes as rows. Every function runs inside a transaction of the caller."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Select, select, update

from proofserve.fleet.errors import LaneStillOpen, NoLaneLeft, RoundOver, UnknownLane, UnknownMember
from proofserve.fleet.records import FleetRound, Lane, LaneProgress, Served
from proofserve.fleet.sql import rounds
from proofserve.fleet.sql.tables import AnyRow, lanes, members
from proofserve.fleet.sql.tables import rounds as rounds_table
from proofserve.fleet.sql.texts import kept
from proofserve.rounds.errors import Refused

_LANE = (
    *(rounds_table.c.id, lanes.c.lane, lanes.c.member, lanes.c.given_at, lanes.c.member_round),
    *(lanes.c.started_at, lanes.c.ended_at, lanes.c.end_reason),
    *(lanes.c.weights_digest, lanes.c.model),
)
_OPEN = lanes.c.ended_at.is_(None)


def give(
    connection: Connection, round_id: str, member_ids: Sequence[str], served: Served, now: float
) -> list[Lane | Refused]:
    """As ``FleetStore.give_lanes``."""
    # Locks the round: two controllers give lanes of it one after the other.
    row = connection.execute(
        select(rounds_table).where(rounds_table.c.id == kept(round_id)).with_for_update()
    ).first()
    if row is None or row.ended_at is not None:
        raise RoundOver(f"round {round_id} has ended, so it gives no more lanes")
    known = set(
        connection.execute(select(members.c.id).where(members.c.removed_at.is_(None))).scalars()
    )
    open_lanes = select(lanes.c.member, lanes.c.lane).where(lanes.c.round == row.number, _OPEN)
    held: dict[str, int] = {each.member: each.lane for each in connection.execute(open_lanes)}
    found: list[Lane | Refused] = []
    given = row.given
    for member_id in member_ids:
        if refusal := _refusal(row, given, member_id, known, held):
            found.append(refusal)
            continue
        found.append(Lane(row.id, given, member_id, now, served=served))
        held[member_id] = given
        given += 1
    new = [each for each in found if isinstance(each, Lane)]
    if new:
        fixed = {"round": row.number, "lanes": row.lanes, "given_at": now} | asdict(served)
        rows = [{**fixed, "lane": each.lane, "member": each.member_id} for each in new]
        connection.execute(lanes.insert(), rows)
        of_round = update(rounds_table).where(rounds_table.c.number == row.number)
        connection.execute(of_round.values(given=given))
    return found


def _refusal(
    row: AnyRow, given: int, member_id: str, known: Collection[str], held: Mapping[str, int]
) -> Refused | None:
    """Why the member gets no lane of the round in ``row``, of which ``given`` are given."""
    if member_id not in known:
        return UnknownMember(f"there is no member {member_id!r}")
    if member_id in held:
        lane = held[member_id]
        return LaneStillOpen(f"member {member_id} still has lane {lane} of round {row.id}")
    if given >= row.lanes:
        return NoLaneLeft(
            f"round {row.id} has given all of its {row.lanes} lanes, and gives none twice:"
            " start the next round with more --lanes"
        )
    return None


def note(
    connection: Connection, started: Mapping[Lane, str], ended: Mapping[Lane, str], now: float
) -> None:
    """As ``FleetStore.note_lanes``."""
    for lane, member_round_id in started.items():
        _change(connection, lane, member_round=kept(member_round_id, 200), started_at=now)
    for lane, reason in ended.items():
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
    # The last two columns are what was served.
    return Lane(*(*row[:-2], Served(*row[-2:])))


def _unknown(round_id: str, lane: int) -> UnknownLane:
    return UnknownLane(f"round {round_id!r} has given no lane {lane}")
