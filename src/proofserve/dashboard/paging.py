"""One page of members, those first that need an operator; and its JSON."""

import hashlib
from collections import Counter
from dataclasses import dataclass

import msgspec

from proofserve.dashboard.records import DashboardSnapshot, Level, MemberPaging, MemberRow

# Most members of one page; with their trends they take some 50 kB.
MOST_MEMBERS = 100
_WORST_FIRST = {Level.BAD: 0, Level.WARNING: 1, Level.IDLE: 2, Level.GOOD: 3}


@dataclass(frozen=True, slots=True)
class PageView:
    """What one open page shows: a page of the members of ``level`` whose text has ``search``."""

    page: int = 1
    limit: int = 50
    level: Level | None = None
    search: str = ""


def ranked(snapshot: DashboardSnapshot) -> DashboardSnapshot:
    """The same snapshot, its members sorted: the worst first."""
    members = tuple(sorted(snapshot.members, key=_rank))
    return msgspec.structs.replace(snapshot, members=members)


def page_of(snapshot: DashboardSnapshot, view: PageView) -> DashboardSnapshot:
    """The part of a ranked ``snapshot`` that ``view`` shows. A page after the last is the last."""
    words = view.search.casefold().split()
    found = [
        member
        for member in snapshot.members
        if view.level in (None, member.level) and _has(member, words)
    ]
    pages = max(1, -(-len(found) // view.limit))
    page = min(view.page, pages)
    first = (page - 1) * view.limit
    paging = MemberPaging(
        page=page,
        pages=pages,
        matching=len(found),
        total=len(snapshot.members),
        levels=Counter(member.level.value for member in snapshot.members),
    )
    members = tuple(found[first : first + view.limit])
    return msgspec.structs.replace(snapshot, members=members, paging=paging)


def encoded(snapshot: DashboardSnapshot) -> tuple[bytes, str]:
    """``snapshot`` in JSON, and a tag that changes with anything but the time of reading."""
    timeless = msgspec.json.encode(msgspec.structs.replace(snapshot, at=0.0))
    tag = hashlib.blake2b(timeless, digest_size=12).hexdigest()
    return msgspec.json.encode(snapshot), tag


def _rank(member: MemberRow) -> tuple[int, bool, float, float, str]:
    age = member.outbox_age_s or 0.0
    convicted = member.verdict is not None and member.verdict.verdict == "fraud"
    return _WORST_FIRST[member.level], not convicted, -(member.stalled_s or 0.0), -age, member.name


def _has(member: MemberRow, words: list[str]) -> bool:
    if not words:
        return True
    texts = (member.name, member.state, member.reason, member.model, member.version)
    text = " ".join(texts).casefold()
    return all(word in text for word in words)
