"""The desired state, rounds and their lanes, as rows."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, insert, select, update

from proofserve.fleet.errors import NoLane, UnknownLane
from proofserve.fleet.records import DesiredState, FleetModel, FleetRound, Lane
from proofserve.fleet.sql.database import StorePart, announces, reads, writes
from proofserve.fleet.sql.tables import AnyRow, desired, kept, lanes, members, rounds
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import from_wire
from proofserve.rounds.prover import lane_of
from proofserve.rounds.records import RoundSpec, Target, Workload
from proofserve.rounds.state import Move, State, step

MOST_LANES = 4096

_ROUND = (rounds.c.number, rounds.c.spec, rounds.c.lanes, rounds.c.opened_at, rounds.c.ended_at)
_OPENS = frozenset({Move.INIT, Move.START, Move.INIT_VALIDATE})
_LANE = (
    *(rounds.c.id, lanes.c.lane, lanes.c.member, lanes.c.given_at, lanes.c.member_round),
    *(lanes.c.started_at, lanes.c.ended_at, lanes.c.end_reason),
    *(lanes.c.weights_digest, lanes.c.model),
    *(lanes.c.batches, lanes.c.stored, lanes.c.last_stored_at),
    *(lanes.c.sampled_at, lanes.c.sampled_batch, lanes.c.sampled_stored),
)
_OPEN = lanes.c.ended_at.is_(None)


class RoundStore(StorePart):
    """What is desired, and who has which lane."""

    @announces
    def open_round(
        self, connection: Connection, spec: RoundSpec, lanes: int, move: Move = Move.START
    ) -> FleetRound:
        """Configure ``spec`` by one of the moves INIT, START and INIT_VALIDATE.

        Any other round is ended. Legality is decided within the transaction, so that one of two
        controllers wins. Raises what ``rounds.state.step`` raises, LaneUnset (START of a spec
        without a lane) and ValueError (``lanes`` outside 1..MOST_LANES, or a known round id).
        """
        if move not in _OPENS:
            raise ValueError(f"the move {move.value} configures no round")
        before = _locked(connection)
        state = step(before.state, move, before.configured)
        if find_round(connection, spec.round_id) is not None:
            raise ValueError(f"round {spec.round_id!r} was opened before")
        if spec.lane is None:
            if move is Move.START:
                lane_of(spec)
            lanes = 0
        elif not 1 <= lanes <= MOST_LANES:
            raise ValueError(f"lanes is {lanes}, which is outside 1..{MOST_LANES}")
        now = self.clock()
        _end_round(connection, before.round, now)
        values = {
            "id": spec.round_id,
            "spec": _spec_text(spec),
            "about": _about(spec.work.block.hash, spec.work.public_key),
            "url": spec.url,
            "opened_at": now,
            "lanes": lanes,
        }
        added = insert(rounds).values(values).returning(rounds.c.number)
        number = connection.execute(added).scalar_one()
        connection.execute(update(desired).values(state=state.value, round=number))
        return FleetRound(number, spec, lanes, now, None)

    @announces
    def move(self, connection: Connection, move: Move) -> DesiredState:
        """Apply GENERATE, VALIDATE or STOP to the configured round; returns the new desired state.

        Raises what ``rounds.state.step`` raises, and LaneUnset for GENERATE without a lane.
        """
        before = _locked(connection)
        state = step(before.state, move, before.configured)
        if before.round is not None:
            if move is Move.GENERATE:
                lane_of(before.round.spec)
            if state is State.STOPPED:
                _end_round(connection, before.round, self.clock())
            else:
                going = update(rounds).where(rounds.c.number == before.round.number)
                connection.execute(going.values(ended_at=None))
        connection.execute(update(desired).values(state=state.value))
        return read_desired(connection)

    @reads
    def rounds_of_block(
        self, connection: Connection, block_hash: str, public_key: str
    ) -> list[FleetRound]:
        """The rounds of a block and key, in the order of their start."""
        chosen = select(*_ROUND).where(rounds.c.about == _about(block_hash, public_key))
        return [_round(row) for row in connection.execute(chosen.order_by(rounds.c.number))]

    @writes
    def give_lanes(
        self, connection: Connection, round_id: str, member_ids: Sequence[str], served: FleetModel
    ) -> list[Lane | NoLane]:
        """A lane for each of ``member_ids``, once and for ever, or why it gets none.

        That is that all were given, that the member has one which was not ended, or that there is
        no such member. ``served`` is what the fleet serves now. Raises NoLane if the round was
        stopped or replaced, or if there is none.
        """
        # Locks the round: two controllers give lanes of it one after the other.
        row = connection.execute(
            select(rounds).where(rounds.c.id == kept(round_id)).with_for_update()
        ).first()
        if row is None or row.ended_at is not None:
            raise NoLane(f"round {round_id} has ended, so it gives no more lanes")
        known = set(
            connection.execute(select(members.c.id).where(members.c.removed_at.is_(None))).scalars()
        )
        open_lanes = select(lanes.c.member, lanes.c.lane).where(lanes.c.round == row.number, _OPEN)
        held: dict[str, int] = {each.member: each.lane for each in connection.execute(open_lanes)}
        now, found, new = self.clock(), list[Lane | NoLane](), list[Lane]()
        for member_id in member_ids:
            given = row.given + len(new)
            if refusal := _refusal(row, given, member_id, known, held):
                found.append(refusal)
                continue
            new.append(Lane(row.id, given, member_id, now, served=served))
            found.append(new[-1])
            held[member_id] = given
        if new:
            fixed = {"round": row.number, "lanes": row.lanes, "given_at": now} | asdict(served)
            rows = [{**fixed, "lane": each.lane, "member": each.member_id} for each in new]
            connection.execute(lanes.insert(), rows)
            of_round = update(rounds).where(rounds.c.number == row.number)
            connection.execute(of_round.values(given=row.given + len(new)))
        return found

    @writes
    def note_lanes(
        self, connection: Connection, started: Mapping[Lane, str], ended: Mapping[Lane, str]
    ) -> None:
        """Note members' ids of their rounds, and why lanes ended.

        A lane that was ended before stays as it is; late callbacks of it are still stored. Raises
        UnknownLane, and notes nothing then.
        """
        now = self.clock()
        for lane, member_round_id in started.items():
            _change(connection, lane, member_round=kept(member_round_id, 200), started_at=now)
        for lane, reason in ended.items():
            _, found = find_lane(connection, lane.round_id, lane.lane)
            if found.ended_at is None:
                _change(connection, lane, ended_at=now, end_reason=kept(reason))

    @reads
    def lane(self, connection: Connection, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
        """The round and its lane of this number. Raises UnknownLane."""
        return find_lane(connection, round_id, lane)

    @reads
    def open_lanes(self, connection: Connection) -> list[Lane]:
        """The lanes of all rounds that were not ended, oldest first."""
        chosen = _lanes_where(_OPEN).order_by(lanes.c.round, lanes.c.lane)
        return [_lane(row) for row in connection.execute(chosen)]

    @writes
    def probe(self, connection: Connection) -> None:
        """Write a row as it is: it fails where nothing can be written."""
        connection.execute(update(desired).values(id=desired.c.id))


# The functions below run inside a transaction of the caller.


def read_desired(connection: Connection) -> DesiredState:
    chosen = select(desired.c.state, *_ROUND).select_from(
        desired.outerjoin(rounds, rounds.c.number == desired.c.round)
    )
    state, *row = tuple(connection.execute(chosen).one())
    return DesiredState(State(state), None if row[0] is None else _round(row))


def find_round(connection: Connection, round_id: str) -> FleetRound | None:
    row = connection.execute(select(*_ROUND).where(rounds.c.id == round_id)).first()
    return None if row is None else _round(row)


def round_of_number(connection: Connection, number: int) -> FleetRound:
    return _round(connection.execute(select(*_ROUND).where(rounds.c.number == number)).one())


def ended_before(connection: Connection, number: int, most: int, since: float) -> list[FleetRound]:
    """The newest ``most`` rounds below ``number``, but for those that ended before ``since``."""
    newest = select(*_ROUND).where(rounds.c.number < number).order_by(rounds.c.number.desc())
    found = [_round(row) for row in connection.execute(newest.limit(most))]
    return [each for each in found if each.ended_at is not None and each.ended_at > since]


def lanes_of(connection: Connection, round_number: int) -> list[Lane]:
    """The given lanes of a round, by number."""
    chosen = _lanes_where(lanes.c.round == round_number).order_by(lanes.c.lane)
    return [_lane(row) for row in connection.execute(chosen)]


def find_lane(connection: Connection, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
    """Raises UnknownLane."""
    chosen = _lanes_where(rounds.c.id == kept(round_id), lanes.c.lane == lane)
    # A number from a URL may be larger than any column.
    row = connection.execute(chosen).first() if 0 <= lane < MOST_LANES else None
    of = find_round(connection, kept(round_id)) if row else None
    if row is None or of is None:
        raise UnknownLane(f"round {round_id!r} has given no lane {lane}")
    return of, _lane(row)


def _locked(connection: Connection) -> DesiredState:
    """The desired state, which nothing else changes until the end of the transaction."""
    connection.execute(select(desired.c.id).with_for_update())
    return read_desired(connection)


def _end_round(connection: Connection, of: FleetRound | None, now: float) -> None:
    if of is not None:
        ended = update(rounds).where(rounds.c.number == of.number, rounds.c.ended_at.is_(None))
        connection.execute(ended.values(ended_at=now))


def _refusal(
    row: AnyRow, given: int, member_id: str, known: Collection[str], held: Mapping[str, int]
) -> NoLane | None:
    """Why the member gets no lane of the round in ``row``, of which ``given`` are given."""
    if member_id not in known:
        return NoLane(f"there is no member {member_id!r}")
    if member_id in held:
        lane = held[member_id]
        return NoLane(f"member {member_id} still has lane {lane} of round {row.id}")
    if given >= row.lanes:
        return NoLane(
            f"round {row.id} has given all of its {row.lanes} lanes, and gives none twice:"
            " start the next round with more --lanes"
        )
    return None


def _change(connection: Connection, lane: Lane, **values: Any) -> None:
    """Raises UnknownLane."""
    number = select(rounds.c.number).where(rounds.c.id == lane.round_id).scalar_subquery()
    of_lane = (lanes.c.round == number) & (lanes.c.lane == lane.lane)
    if not connection.execute(update(lanes).where(of_lane).values(**values)).rowcount:
        raise UnknownLane(f"round {lane.round_id!r} has given no lane {lane.lane}")


def _lanes_where(*conditions: ColumnElement[bool]) -> Select[Any]:
    joined = select(*_LANE).join_from(lanes, rounds, rounds.c.number == lanes.c.round)
    return joined.where(*conditions)


def _lane(row: Sequence[Any]) -> Lane:
    # Columns 8 and 9 are what was served.
    return Lane(*(*row[:8], FleetModel(*row[8:10]), *row[10:]))


def _round(row: Sequence[Any]) -> FleetRound:
    number, spec, lanes, opened_at, ended_at = row
    return FleetRound(number, read_spec(spec), lanes, opened_at, ended_at)


# Specs as JSON, for columns. ASCII only: a block hash or key may hold what a database does not
# store.


def _about(block_hash: str, public_key: str) -> str:
    """By which rounds of one block and key are found."""
    return json.dumps([block_hash, public_key])


def _spec_text(spec: RoundSpec) -> str:
    return json.dumps(
        {
            "round_id": spec.round_id,
            **work_fields(spec.work),
            "lane": asdict(spec.lane) if spec.lane else None,
            "batch_size": spec.batch_size,
            "url": spec.url,
            "target": asdict(spec.target) if spec.target else None,
            "commits_roots": spec.commits_roots,
        }
    )


def read_spec(text: str) -> RoundSpec:
    fields = json.loads(text)
    lane, target = fields["lane"], fields["target"]
    return RoundSpec(
        round_id=fields["round_id"],
        work=work_of(fields),
        lane=None if lane is None else NonceLane(**lane),
        batch_size=fields["batch_size"],
        url=fields["url"],
        target=None if target is None else Target(**target),
        commits_roots=fields["commits_roots"],
    )


def work_fields(work: Workload) -> dict[str, Any]:
    return {
        "scheme": work.scheme.to_wire(),
        "block": asdict(work.block),
        "public_key": work.public_key,
        "seq_len": work.seq_len,
    }


def work_of(fields: Mapping[str, Any]) -> Workload:
    """What ``work_fields`` described."""
    return Workload(
        scheme=from_wire(fields["scheme"]),
        block=Block(**fields["block"]),
        public_key=fields["public_key"],
        seq_len=fields["seq_len"],
    )
