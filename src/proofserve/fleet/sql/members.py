"""Members as rows. Every function runs inside a transaction of the caller."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from sqlalchemy import Connection, bindparam, func, select, update

from proofserve.fleet.errors import FleetFull, UnknownMember
from proofserve.fleet.records import Member, MemberSource, Seen, Wish
from proofserve.fleet.sql import lanes
from proofserve.fleet.sql.dialects import insert_into
from proofserve.fleet.sql.tables import members
from proofserve.fleet.sql.texts import kept, kept_if

MOST_MEMBERS = 10_000
# The largest body of a member's status that is kept, and the largest look without it, as JSON.
STATUS_BYTES = 16 * 1024
_SEEN_BYTES = 8 * 1024

_COLUMNS = (
    *(members.c.id, members.c.name, members.c.url, members.c.source, members.c.wish),
    *(members.c.wish_reason, members.c.added_at, members.c.seen),
)
_KNOWN = members.c.removed_at.is_(None)


class KnownLooks:
    """The last look at each member by its text: most readings find the texts of the one before."""

    def __init__(self) -> None:
        self._looks: dict[str, tuple[str, Seen]] = {}

    def listed(self, connection: Connection) -> list[Member]:
        """The members that were not removed, by name."""
        rows = connection.execute(
            select(*_COLUMNS).where(_KNOWN).order_by(members.c.name, members.c.id)
        ).all()
        before, looks = self._looks, {}
        found = []
        for *known, text in rows:
            member_id, seen = known[0], None
            if text is not None:
                before_text, seen = before.get(member_id, ("", None))
                if seen is None or before_text != text:
                    seen = _seen(json.loads(text))
                looks[member_id] = text, seen
            found.append(_member(known, seen))
        # At once, as another thread may read, too.
        self._looks = looks
        return found


def put(connection: Connection, url: str, name: str, source: MemberSource, now: float) -> Member:
    """As ``FleetStore.put_member``."""
    url = kept(url, 2000).rstrip("/")
    told = {"name": kept(name, 200), "source": source.value}
    fresh = {"wish": Wish.ACTIVE.value, "wish_reason": None, "added_at": now, "removed_at": None}
    added = insert_into(connection, members).values(id=uuid.uuid4().hex, url=url, **told, **fresh)
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
    return find(connection, row.id)


def find(connection: Connection, member_id: str) -> Member:
    """Raises UnknownMember."""
    row = connection.execute(
        select(*_COLUMNS).where(_KNOWN, members.c.id == kept(member_id))
    ).first()
    if row is None:
        raise UnknownMember(
            f"there is no member {member_id!r}: `proofserve fleet members` lists them"
        )
    *known, text = row
    return _member(known, None if text is None else _seen(json.loads(text)))


def find_any(connection: Connection, member_id: str) -> Member:
    """A member, also one that was removed."""
    *known, text = connection.execute(select(*_COLUMNS).where(members.c.id == member_id)).one()
    return _member(known, None if text is None else _seen(json.loads(text)))


def remove(connection: Connection, member_id: str, reason: str, now: float) -> None:
    find(connection, member_id)
    connection.execute(update(members).where(members.c.id == member_id).values(removed_at=now))
    lanes.end_all_of(connection, member_id, reason, now)


def wish(connection: Connection, member_id: str, wanted: Wish, reason: str | None) -> Member:
    values = {"wish": wanted.value, "wish_reason": kept_if(reason)}
    connection.execute(update(members).where(members.c.id == kept(member_id)).values(**values))
    return find(connection, member_id)


def add_seen(connection: Connection, reports: Mapping[str, Seen]) -> None:
    """Store looks as JSON, by member id."""
    # In one order, so that no two stores wait for each other.
    ids = sorted(reports)
    rows = [{"of": kept(each), "text": _seen_json(reports[each])} for each in ids]
    if rows:
        changed = update(members).where(members.c.id == bindparam("of"))
        connection.execute(changed.values(seen=bindparam("text")), rows)


def _seen_json(seen: Seen) -> str:
    """A look as JSON of at most STATUS_BYTES and some kilobytes, whatever the member answered."""
    error = kept_if(seen.error)
    status = _dumped(seen.status)
    if status is None or len(status) > STATUS_BYTES:
        seen = replace(seen, status=None)
    # Not asdict, which copies a deep status by more recursion than JSON had.
    shallow = {field.name: getattr(seen, field.name) for field in fields(seen)}
    text = _dumped(shallow | {"error": error})
    if text is None or len(text) > STATUS_BYTES + _SEEN_BYTES:
        bare = Seen(seen.at, answered=seen.answered, error=error or "its answers are too large")
        text = json.dumps(asdict(bare))
    return text


def _dumped(value: Mapping[str, Any] | None) -> str | None:
    """ASCII text; None for what JSON cannot hold."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):
        return None


def _member(row: Sequence[Any], seen: Seen | None) -> Member:
    member_id, name, url, source, wanted, wish_reason, added_at = row
    return Member(
        id=member_id,
        name=name,
        url=url,
        source=MemberSource(source),
        wish=Wish(wanted),
        wish_reason=wish_reason,
        added_at=added_at,
        seen=seen,
    )


def _seen(known: dict[str, Any]) -> Seen:
    return Seen(**{**known, "model_names": tuple(known["model_names"])})
