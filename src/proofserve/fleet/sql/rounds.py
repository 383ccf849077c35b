"""Rounds and the desired state as rows. Every function runs inside a caller's transaction."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from proofserve.fleet.records import Desired, FleetRound
from proofserve.fleet.sql import spec_json
from proofserve.fleet.sql.tables import desired, rounds
from proofserve.rounds.prover import lane_of
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import Configured, Move, State, step

MOST_LANES = 4096

_ROUND = (rounds.c.number, rounds.c.spec, rounds.c.lanes, rounds.c.opened_at, rounds.c.ended_at)
_OPENS = frozenset({Move.INIT, Move.START, Move.INIT_VALIDATE})


def read(connection: Connection) -> Desired:
    chosen = select(desired.c.state, *_ROUND).select_from(
        desired.outerjoin(rounds, rounds.c.number == desired.c.round)
    )
    state, *row = tuple(connection.execute(chosen).one())
    return Desired(State(state), None if row[0] is None else _round(row))


def open_one(
    connection: Connection, spec: RoundSpec, lanes: int, move: Move, now: float
) -> FleetRound:
    """As ``FleetStore.open_round``."""
    if move not in _OPENS:
        raise ValueError(f"the move {move.value} configures no round")
    before = _locked(connection)
    state = step(before.state, move, _kind(before.round))
    if find(connection, spec.round_id) is not None:
        raise ValueError(f"round {spec.round_id!r} was opened before")
    if spec.lane is None:
        if move is Move.START:
            lane_of(spec)
        lanes = 0
    elif not 1 <= lanes <= MOST_LANES:
        raise ValueError(f"lanes is {lanes}, which is outside 1..{MOST_LANES}")
    if before.round is not None:
        _end(connection, before.round.number, now)
    work = spec.work
    values = {
        "id": spec.round_id,
        "spec": spec_json.dumps(spec),
        "about": spec_json.about(work.block.hash, work.public_key),
        "url": spec.url,
        "opened_at": now,
        "lanes": lanes,
    }
    number = connection.execute(
        insert(rounds).values(values).returning(rounds.c.number)
    ).scalar_one()
    connection.execute(update(desired).values(state=state.value, round=number))
    return FleetRound(number, spec, lanes, now, None)


def move(connection: Connection, chosen: Move, now: float) -> Desired:
    """As ``FleetStore.move``."""
    before = _locked(connection)
    state = step(before.state, chosen, _kind(before.round))
    if before.round is not None:
        if chosen is Move.GENERATE:
            lane_of(before.round.spec)
        if state is State.STOPPED:
            _end(connection, before.round.number, now)
        else:
            going = update(rounds).where(rounds.c.number == before.round.number)
            connection.execute(going.values(ended_at=None))
    connection.execute(update(desired).values(state=state.value))
    return read(connection)


def find(connection: Connection, round_id: str) -> FleetRound | None:
    row = connection.execute(select(*_ROUND).where(rounds.c.id == round_id)).first()
    return None if row is None else _round(row)


def by_number(connection: Connection, number: int) -> FleetRound:
    return _round(connection.execute(select(*_ROUND).where(rounds.c.number == number)).one())


def ended_before(connection: Connection, number: int, most: int, since: float) -> list[FleetRound]:
    """The newest ``most`` rounds below ``number``, but for those that ended before ``since``."""
    newest = select(*_ROUND).where(rounds.c.number < number).order_by(rounds.c.number.desc())
    found = [_round(row) for row in connection.execute(newest.limit(most))]
    return [each for each in found if each.ended_at is not None and each.ended_at > since]


def of_block(connection: Connection, block_hash: str, public_key: str) -> list[FleetRound]:
    chosen = select(*_ROUND).where(rounds.c.about == spec_json.about(block_hash, public_key))
    return [_round(row) for row in connection.execute(chosen.order_by(rounds.c.number))]


def touch(connection: Connection) -> None:
    """Write a row as it is: it fails where nothing can be written."""
    connection.execute(update(desired).values(id=desired.c.id))


def _locked(connection: Connection) -> Desired:
    """The desired state, which nothing else changes until the end of the transaction."""
    connection.execute(select(desired.c.id).with_for_update())
    return read(connection)


def _end(connection: Connection, number: int, now: float) -> None:
    ended = update(rounds).where(rounds.c.number == number, rounds.c.ended_at.is_(None))
    connection.execute(ended.values(ended_at=now))


def _kind(configured: FleetRound | None) -> Configured:
    if configured is None:
        return Configured.NOTHING
    return Configured.ARTIFACT if configured.spec.target is None else Configured.DISTANCE


def _round(row: Sequence[Any]) -> FleetRound:
    number, spec, lanes, opened_at, ended_at = row
    return FleetRound(number, spec_json.loads(spec), lanes, opened_at, ended_at)
