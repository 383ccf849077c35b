"""Members with the last look at each, the desired state, rounds and their lanes, as rows."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, Connection, bindparam, func, insert, select, update

from proofserve.fleet.records import (
    DesiredState,
    FleetRound,
    Lane,
    Member,
    MemberLook,
    MemberSource,
    Wish,
)
from proofserve.fleet.sql.database import FleetDatabase
from proofserve.fleet.sql.tables import (
    AnyRow,
    desired,
    insert_into,
    kept_if,
    lanes,
    members,
    read_spec,
    record_text,
    round_about,
    rounds,
)
from proofserve.outbox.database import StorePart, announces, kept, reads, writes
from proofserve.rounds.errors import Refusal, Refused
from proofserve.rounds.generation import lane_of
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import Move, State, step

MOST_MEMBERS = 10_000
# The largest look at a member that is kept with its status, as JSON.
STATUS_BYTES = 16 * 1024
MOST_LANES = 4096

_LOOK = TypeAdapter(MemberLook)
_KNOWN = members.c.removed_at.is_(None)
_OPENS = frozenset({Move.INIT, Move.START, Move.INIT_VALIDATE})
_LANE = (
    *(each for each in lanes.c if each.name in {field.name for field in fields(Lane)}),
    *(rounds.c.id.label("round_id"), lanes.c.member.label("member_id")),
    lanes.c.member_round.label("member_round_id"),
)
_OPEN = lanes.c.ended_at.is_(None)


class RoundStore(StorePart[FleetDatabase]):
    """Who belongs to the fleet, what is desired, and who has which lane."""

    # The last look at each member by its text: most readings find the texts of the one before.
    _looks: Mapping[str, tuple[str, MemberLook]] = {}

    @writes
    def put_member(
        self, connection: Connection, url: str, name: str, source: MemberSource
    ) -> Member:
        """The member with this URL: a new one, or the known one with this name and source.

        A member that was removed comes back with its id, active. Raises Refused (FLEET_FULL).
        """
        url = kept(url, 2000).rstrip("/")
        told = {"name": kept(name, 200), "source": source.value}
        fresh: dict[str, Any] = {"wish": Wish.ACTIVE.value, "added_at": self.clock()}
        fresh |= {"wish_reason": None, "removed_at": None}
        added = insert_into(connection, members).values(
            id=uuid.uuid4().hex, url=url, **told, **fresh
        )
        # Two controllers may hear of a member at the same time: one adds it, the other finds it.
        connection.execute(added.on_conflict_do_nothing(index_elements=[members.c.url]))
        row = connection.execute(
            select(members.c.id, members.c.removed_at).where(members.c.url == url).with_for_update()
        ).one()
        back = {} if row.removed_at is None else fresh | {"seen": None}
        connection.execute(update(members).where(members.c.id == row.id).values(**told, **back))
        count = connection.execute(select(func.count()).where(_KNOWN)).scalar_one()
        if count > MOST_MEMBERS:
            text = f"the fleet has {count - 1} members, the most that it may have: remove some"
            raise Refused(Refusal.FLEET_FULL, text)
        return _known_member(connection, row.id)

    @writes
    def remove_member(
        self, connection: Connection, member_id: str, reason: str = "the member was removed"
    ) -> None:
        """Forget a member and end its lanes. Its results stay. Raises Refused (UNKNOWN_MEMBER)."""
        _known_member(connection, member_id)
        now = self.clock()
        connection.execute(update(members).where(members.c.id == member_id).values(removed_at=now))
        own = (lanes.c.member == member_id) & lanes.c.ended_at.is_(None)
        ended = update(lanes).where(own).values(ended_at=now, end_reason=kept(reason))
        connection.execute(ended)

    @writes
    def wish(
        self, connection: Connection, member_id: str, wish: Wish, reason: str | None
    ) -> Member:
        """Store what the operator wants of a member. Raises Refused (UNKNOWN_MEMBER)."""
        values = {"wish": wish.value, "wish_reason": kept_if(reason)}
        connection.execute(update(members).where(members.c.id == kept(member_id)).values(**values))
        return _known_member(connection, member_id)

    @writes
    def add_looks(self, connection: Connection, looks: Mapping[str, MemberLook]) -> None:
        """Store the last looks, by member id. Ids without a member are ignored."""
        # In one order, so that no two stores wait for each other.
        stored = {kept(id_): _as_stored(looks[id_]) for id_ in sorted(looks)}
        if stored:
            changed = update(members).where(members.c.id == bindparam("of"))
            rows = [{"of": id_, "text": text} for id_, (text, _) in stored.items()]
            connection.execute(changed.values(seen=bindparam("text")), rows)
            # The next reading need not parse what was just written.
            self._looks = {**self._looks, **stored}

    def listed(self, connection: Connection) -> list[Member]:
        """The members that were not removed, by name; inside the caller's transaction."""
        ordered = select(members).where(_KNOWN).order_by(members.c.name, members.c.id)
        before, looks, found = self._looks, {}, []
        for row in connection.execute(ordered).all():
            text, look = before.get(row.id, ("", None))
            member = _member(row, look if text == row.seen else None)
            found.append(member)
            if member.seen is not None:
                looks[member.id] = row.seen, member.seen
        # At once, as another thread may read, too.
        self._looks = looks
        return found

    @announces
    def open_round(
        self, connection: Connection, spec: RoundSpec, lanes: int, move: Move = Move.START
    ) -> FleetRound:
        """Configure ``spec`` by one of the moves INIT, START and INIT_VALIDATE.

        Any other round is ended. Legality is decided within the transaction, so that one of two
        controllers wins. Raises what ``rounds.state.step`` raises, Refused (LANE_UNSET: START of
        a spec without a lane) and ValueError (``lanes`` outside 1..MOST_LANES, or a known round
        id).
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
            "spec": record_text(spec),
            "about": round_about(spec.work.block.hash, spec.work.public_key),
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
        """Apply GENERATE, VALIDATE or STOP to the configured round; returns what is desired now.

        Raises what ``rounds.state.step`` raises, and Refused for GENERATE without a lane.
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

    @writes
    def give_lanes(
        self,
        connection: Connection,
        round_id: str,
        member_ids: Sequence[str],
        weights_digest: str | None = None,
        model: str | None = None,
    ) -> list[Lane | Refused]:
        """A lane for each of ``member_ids``, once and for ever, or why it gets none.

        That is that the round has ended or all lanes were given, that the member has one which was
        not ended, or that there is no such member. The last two are what the fleet serves now.
        """
        # Locks the round: two controllers give lanes of it one after the other.
        row = connection.execute(
            select(rounds).where(rounds.c.id == kept(round_id)).with_for_update()
        ).first()
        if row is None or row.ended_at is not None:
            text = f"round {round_id} has ended, so it gives no more lanes"
            return [Refused(Refusal.NO_LANE, text)] * len(member_ids)
        known = set(connection.execute(select(members.c.id).where(_KNOWN)).scalars())
        open_lanes = select(lanes.c.member, lanes.c.lane).where(lanes.c.round == row.number, _OPEN)
        held: dict[str, int] = {each.member: each.lane for each in connection.execute(open_lanes)}
        now, found, new = self.clock(), list[Lane | Refused](), list[Lane]()
        served: dict[str, Any] = {"weights_digest": weights_digest, "model": model}
        for member_id in member_ids:
            given = row.given + len(new)
            if member_id not in known:
                why = f"there is no member {member_id!r}"
            elif member_id in held:
                why = f"member {member_id} still has lane {held[member_id]} of round {row.id}"
            elif given >= row.lanes:
                why = (
                    f"round {row.id} has given all of its {row.lanes} lanes, and gives none twice:"
                    " start the next round with more --lanes"
                )
            else:
                held[member_id] = given
                new.append(Lane(row.id, given, member_id, now, **served))
                found.append(new[-1])
                continue
            found.append(Refused(Refusal.NO_LANE, why))
        if new:
            fixed = {"round": row.number, "lanes": row.lanes, "given_at": now, **served}
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
        Refused (UNKNOWN_LANE), and notes nothing then.
        """
        now = self.clock()
        for lane, member_round_id in started.items():
            _change(connection, lane, member_round=kept(member_round_id, 200), started_at=now)
        for lane, reason in ended.items():
            first = {
                "ended_at": func.coalesce(lanes.c.ended_at, now),
                "end_reason": func.coalesce(lanes.c.end_reason, kept(reason)),
            }
            _change(connection, lane, **first)

    @reads
    def lane(self, connection: Connection, round_id: str, lane: int) -> tuple[FleetRound, Lane]:
        """The round and its lane of this number. Raises Refused (UNKNOWN_LANE)."""
        # A number from a URL may be larger than any column.
        number, id_ = min(lane, MOST_LANES), kept(round_id)
        given = lanes_where(connection, rounds.c.id == id_, lanes.c.lane == number)
        of = find_round(connection, id_)
        if not given or of is None:
            raise Refused(Refusal.UNKNOWN_LANE, f"round {round_id!r} has given no lane {lane}")
        return of, given[0]

    @reads
    def open_lanes(self, connection: Connection) -> list[Lane]:
        """The lanes of all rounds that were not ended, oldest first."""
        return lanes_where(connection, _OPEN)

    @writes
    def probe(self, connection: Connection) -> None:
        """Write a row as it is: it fails where nothing can be written."""
        connection.execute(update(desired).values(id=desired.c.id))


# The functions below run inside a transaction of the caller.


def read_desired(connection: Connection) -> DesiredState:
    chosen = select(desired.c.state, rounds).select_from(
        desired.outerjoin(rounds, rounds.c.number == desired.c.round)
    )
    row = connection.execute(chosen).one()
    return DesiredState(State(row.state), None if row.number is None else _round(row))


def find_round(connection: Connection, round_id: str) -> FleetRound | None:
    return next(iter(rounds_where(connection, rounds.c.id == round_id)), None)


def rounds_where(
    connection: Connection, chosen: ColumnElement[bool], most_of_newest: int | None = None
) -> list[FleetRound]:
    """The chosen rounds in the order of their start, at most the newest ``most_of_newest``."""
    newest = select(rounds).where(chosen).order_by(rounds.c.number.desc())
    return [_round(row) for row in connection.execute(newest.limit(most_of_newest))][::-1]


def lanes_where(connection: Connection, *conditions: ColumnElement[bool]) -> list[Lane]:
    """The given lanes, by round and number."""
    joined = select(*_LANE).join_from(lanes, rounds, rounds.c.number == lanes.c.round)
    ordered = joined.where(*conditions).order_by(lanes.c.round, lanes.c.lane)
    return [Lane(**row._mapping) for row in connection.execute(ordered)]


def _locked(connection: Connection) -> DesiredState:
    """The desired state, which nothing else changes until the end of the transaction."""
    connection.execute(select(desired.c.id).with_for_update())
    return read_desired(connection)


def _end_round(connection: Connection, of: FleetRound | None, now: float) -> None:
    if of is not None:
        ended = update(rounds).where(rounds.c.number == of.number, rounds.c.ended_at.is_(None))
        connection.execute(ended.values(ended_at=now))


def _change(connection: Connection, lane: Lane, **values: Any) -> None:
    """Raises Refused (UNKNOWN_LANE)."""
    number = select(rounds.c.number).where(rounds.c.id == lane.round_id).scalar_subquery()
    of_lane = (lanes.c.round == number) & (lanes.c.lane == lane.lane)
    if not connection.execute(update(lanes).where(of_lane).values(**values)).rowcount:
        text = f"round {lane.round_id!r} has given no lane {lane.lane}"
        raise Refused(Refusal.UNKNOWN_LANE, text)


def _round(row: AnyRow) -> FleetRound:
    return FleetRound(row.number, read_spec(row.spec), row.lanes, row.opened_at, row.ended_at)


def find_member(connection: Connection, member_id: str) -> Member:
    """A member, also one that was removed."""
    return _member(connection.execute(select(members).where(members.c.id == member_id)).one())


def active_members(connection: Connection) -> list[Member]:
    """Those that take part, by name."""
    active = select(members).where(_KNOWN, members.c.wish == Wish.ACTIVE.value)
    rows = connection.execute(active.order_by(members.c.name, members.c.id))
    return [_member(row) for row in rows]


def _known_member(connection: Connection, member_id: str) -> Member:
    """Raises Refused (UNKNOWN_MEMBER)."""
    known = select(members).where(_KNOWN, members.c.id == kept(member_id))
    if (row := connection.execute(known).first()) is None:
        text = f"there is no member {member_id!r}: `proofserve fleet members` lists them"
        raise Refused(Refusal.UNKNOWN_MEMBER, text)
    return _member(row)


def _member(row: AnyRow, look: MemberLook | None = None) -> Member:
    """``look`` is what the text of the row says, None if it was not read before."""
    if look is None and row.seen is not None:
        facts = json.loads(row.seen)
        try:
            look = _LOOK.validate_python(facts)
        except ValidationError:
            # A controller of another version stored it; the next look replaces it.
            look = _LOOK.validate_python(facts | {"status": None})
    wish, source = Wish(row.wish), MemberSource(row.source)
    return Member(row.id, row.name, row.url, source, wish, row.wish_reason, row.added_at, look)


def _as_stored(look: MemberLook) -> tuple[str, MemberLook]:
    """The text of a look, at most STATUS_BYTES, and the look that it says.

    A longer one is stored without the status.
    """
    look = replace(look, error=kept_if(look.error))
    if len(text := _look_text(look)) > STATUS_BYTES:
        look = replace(look, status=None)
        text = _look_text(look)
    return text, look


def _look_text(look: MemberLook) -> str:
    # ASCII only: a text of a member may hold what a database does not store.
    return json.dumps(_LOOK.dump_python(look), allow_nan=False, separators=(",", ":"))
