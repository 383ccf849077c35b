"""Which members a page has, in which order, and how large a snapshot may be."""

import time

import msgspec
import pytest

from dashboard.snapshots import fleet
from proofserve.dashboard.records import DashboardSnapshot, History, Level
from proofserve.dashboard.routes import MOST_MEMBERS, PageView, encoded, page_of, ranked

FLEET = ranked(fleet(1000))
ORDER = [Level.BAD, Level.WARNING, Level.IDLE, Level.GOOD]


def test_the_worst_come_first() -> None:
    levels = [ORDER.index(member.level) for member in FLEET.members]
    assert levels == sorted(levels)
    lost = [member.stalled_s or 0 for member in FLEET.members if member.state == "lost"]
    assert lost == sorted(lost, reverse=True)
    first = FLEET.members[0]
    assert first.verdict is not None
    assert first.verdict.verdict == "fraud"


def test_all_pages_together_have_every_member_once() -> None:
    first = page_of(FLEET, PageView(limit=60))
    assert first.paging is not None
    assert (first.paging.pages, first.paging.matching, first.paging.total) == (17, 1000, 1000)
    seen = [
        member.id
        for page in range(1, first.paging.pages + 1)
        for member in page_of(FLEET, PageView(page, 60)).members
    ]
    assert sorted(seen) == sorted(member.id for member in FLEET.members)


def test_a_filter_and_words_choose_members() -> None:
    found = page_of(FLEET, PageView(level=Level.BAD, search="QWEN 4 bits")).paging
    assert found is not None
    assert found.matching == 10
    # The counts by level are of all members: they are on the buttons of the filter.
    assert found.levels == {"bad": 20, "warning": 20, "good": 960}


def test_a_page_after_the_last_is_the_last() -> None:
    last = page_of(FLEET, PageView(page=10_000, limit=100))
    assert last.paging is not None
    assert (last.paging.page, len(last.members)) == (10, 100)
    none = page_of(FLEET, PageView(search="no such member"))
    assert none.paging is not None
    assert (none.paging.pages, none.members) == (1, ())


def test_a_snapshot_is_bounded_and_quick() -> None:
    members = fleet(1000)
    began = time.perf_counter()
    body, _ = encoded(page_of(ranked(members), PageView(limit=MOST_MEMBERS)))
    seconds = time.perf_counter() - began
    print(f"1,000 members: {len(body):,} bytes in {seconds * 1e3:.1f} ms, {MOST_MEMBERS} of them")
    assert len(body) < 150_000


def test_the_tag_changes_with_what_is_shown_alone() -> None:
    later = msgspec.structs.replace(FLEET, at=FLEET.at + 60)
    assert encoded(later)[1] == encoded(FLEET)[1]
    assert encoded(msgspec.structs.replace(FLEET, note="!"))[1] != encoded(FLEET)[1]


def test_what_a_server_does_not_have_is_absent() -> None:
    body, _ = encoded(DashboardSnapshot(kind="node", title="a", at=1.0))
    assert msgspec.json.decode(body) == {"kind": "node", "title": "a", "at": 1.0}


@pytest.mark.parametrize("usual", [3.0, 812.0])
def test_the_usual_value_is_of_the_time_before_the_newest_minute(usual: float) -> None:
    history = History(kept=100)
    assert history.trend().baseline is None
    for _ in range(48):
        history.add(usual)
    for _ in range(12):
        history.add(usual / 10)
    trend = history.trend(24)
    assert trend.baseline == usual
    assert trend.values == (usual,) * 12 + (usual / 10,) * 12


def test_a_history_is_bounded_and_skips_what_was_not_measured() -> None:
    history = History(kept=48)
    for _ in range(300):
        history.add(None)
    assert history.trend(1000).values == (None,) * 48
    assert history.trend().baseline is None
