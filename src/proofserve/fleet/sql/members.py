"""Members and the last look at each, as rows."""

import asyncio
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from proofserve.fleet.errors import FleetFull, UnknownMember
from proofserve.fleet.records import Member, MemberLook, MemberSource, Wish, read_status
from proofserve.fleet.sql.database import FleetDatabase, StorePart, writes
from proofserve.fleet.sql.tables import insert_into, kept, kept_if, lanes, members

MOST_MEMBERS = 10_000
# The largest status of a member that is kept, as JSON.
STATUS_BYTES = 16 * 1024

_COLUMNS = (
    *(members.c.id, members.c.name, members.c.url, members.c.source, members.c.wish),
    *(members.c.wish_reason, members.c.added_at, members.c.seen),
)
_KNOWN = members.c.removed_at.is_(None)


class MemberStore(StorePart):
    """Who belongs to the fleet, and what the last look at each found."""

    def __init__(
        self, database: FleetDatabase, clock: Callable[[], float], news: asyncio.Event
    ) -> None:
        super().__init__(database, clock, news)
        # The last look at each member by its text: most readings find the texts of the one before.
        self._looks: dict[str, tuple[str, MemberLook]] = {}

    @writes
    def put_member(
        self, connection: Connection, url: str, name: str, source: MemberSource
    ) -> Member:
        """The member with this URL: a new one, or the known one with this name and source.

        A member that was removed comes back with its id, active. Raises FleetFull.
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
            raise FleetFull(
                f"the fleet has {count - 1} members, the most that it may have: remove some"
            )
        return _known_member(connection, row.id)

    @writes
    def remove_member(
        self, connection: Connection, member_id: str, reason: str = "the member was removed"
    ) -> None:
        """Forget a member and end its lanes. Its results stay. Raises UnknownMember."""
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
        """Store what the operator wants of a member. Raises UnknownMember."""
        values = {"wish": wish.value, "wish_reason": kept_if(reason)}
        connection.execute(update(members).where(members.c.id == kept(member_id)).values(**values))
        return _known_member(connection, member_id)

    @writes
    def add_looks(self, connection: Connection, looks: Mapping[str, MemberLook]) -> None:
        """Store the last looks, by member id. Ids without a member are ignored.

        A status above STATUS_BYTES of JSON is left out.
        """
        # In one order, so that no two stores wait for each other.
        rows = [{"of": kept(id_), "text": _look_text(looks[id_])} for id_ in sorted(looks)]
        if rows:
            changed = update(members).where(members.c.id == bindparam("of"))
            connection.execute(changed.values(seen=bindparam("text")), rows)

    def listed(self, connection: Connection) -> list[Member]:
        """The members that were not removed, by name; inside the caller's transaction."""
        ordered = select(*_COLUMNS).where(_KNOWN).order_by(members.c.name, members.c.id)
        before, looks, found = self._looks, {}, []
        for row in connection.execute(ordered).all():
            member_id, text, look = row.id, row.seen, None
            if text is not None:
                before_text, look = before.get(member_id, ("", None))
                if look is None or before_text != text:
                    look = _read_look(text)
                looks[member_id] = text, look
            found.append(_member(row, look))
        # At once, as another thread may read, too.
        self._looks = looks
        return found


def find_member(connection: Connection, member_id: str) -> Member:
    """A member, also one that was removed."""
    row = connection.execute(select(*_COLUMNS).where(members.c.id == member_id)).one()
    return _member(row, None if row.seen is None else _read_look(row.seen))


def _known_member(connection: Connection, member_id: str) -> Member:
    """Raises UnknownMember."""
    known = select(members.c.id).where(_KNOWN, members.c.id == kept(member_id))
    if connection.execute(known).first() is None:
        raise UnknownMember(
            f"there is no member {member_id!r}: `proofserve fleet members` lists them"
        )
    return find_member(connection, kept(member_id))


def _member(row: Sequence[Any], look: MemberLook | None) -> Member:
    id_, name, url, source, wish, reason, added_at, _ = row
    return Member(id_, name, url, MemberSource(source), Wish(wish), reason, added_at, look)


def _look_text(look: MemberLook) -> str:
    """A look as JSON of at most STATUS_BYTES and some kilobytes, whatever the member answered."""
    status = None if look.status is None else look.status.parts()
    if status is not None and len(_dumped(status)) > STATUS_BYTES:
        status = None
    error = kept_if(look.error)
    facts = {"at": look.at, "answered": look.answered, "clock_offset_s": look.clock_offset_s}
    return _dumped(facts | {"error": error, "status": status})


def _read_look(text: str) -> MemberLook:
    fields = json.loads(text)
    try:
        status = None if fields["status"] is None else read_status(fields["status"])
    except ValueError:
        # A controller of another version stored it; the next look replaces it.
        status = None
    return MemberLook(**{**fields, "status": status})


def _dumped(value: Mapping[str, Any]) -> str:
    """ASCII only: a text of a member may hold what a database does not store."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
