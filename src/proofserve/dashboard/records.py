"""What a dashboard shows, as frozen records, and the history of a number that it shows as a trend.

Times are Unix seconds, durations seconds, rates per second. JSON leaves out default values.
"""

from collections import deque
from enum import StrEnum
from statistics import median
from typing import Any, Literal

import msgspec

# Seconds between two values, and how many are kept: an hour of them.
STEP_S = 5.0
KEPT = 720
# Values of a minute: an operator compares the newest ones with the usual value.
_MINUTE = 12

ShownVerdict = Literal["honest", "fraud", "undecided", "unproved", "no verdict"]


class Level(StrEnum):
    """How much a state asks for an operator's attention."""

    GOOD = "good"
    IDLE = "idle"
    WARNING = "warning"
    BAD = "bad"


class DashboardRecord(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Base of the records; see above."""


class Trend(DashboardRecord, frozen=True, kw_only=True):
    """Values at even steps, oldest first; ``baseline`` is the usual value. None: not measured."""

    step_s: float
    values: tuple[float | None, ...]
    baseline: float | None = None


class History:
    """The newest values of one number, one for each step; None where nothing was measured."""

    def __init__(self, kept: int = KEPT) -> None:
        self._values: deque[float | None] = deque(maxlen=kept)
        self._added = 0
        self._baseline: float | None = None

    def add(self, value: float | None) -> None:
        self._values.append(None if value is None else rounded(value))
        self._added += 1
        # Once in a minute, because this sorts the whole history.
        if self._added % _MINUTE == 0:
            older = [each for each in list(self._values)[:-_MINUTE] if each]
            self._baseline = rounded(median(older)) if len(older) >= 2 * _MINUTE else None

    def trend(self, last: int = 60) -> Trend:
        """The ``last`` values. The baseline is the median before the newest minute, without 0."""
        skipped = max(0, len(self._values) - last)
        values = tuple(self._values)[skipped:]
        return Trend(step_s=STEP_S, values=values, baseline=self._baseline)


def rounded(value: float) -> float:
    """``value`` with four digits that count: a page with many histories stays small."""
    return float(f"{value:.4g}")


class Fact(DashboardRecord, frozen=True, kw_only=True):
    """One line of details: a label, and a text or a number with its unit."""

    label: str
    value: str | float | int
    unit: str = ""


class KeyFigure(DashboardRecord, frozen=True, kw_only=True):
    """A number at the top of the page. ``value`` is None where it is not known at the moment."""

    label: str
    value: float | int | None
    unit: str = ""
    of: float | int | None = None
    hint: str = ""
    level: Level = Level.GOOD
    trend: Trend | None = None


class ActionField(DashboardRecord, frozen=True, kw_only=True):
    """An input of an action. Dots in ``name`` lead into objects of the body."""

    name: str
    label: str
    kind: Literal["text", "integer", "number"] = "text"
    value: str | float | int | None = None
    required: bool = False


class ActionOffer(DashboardRecord, frozen=True, kw_only=True):
    """A call that the page makes after a confirmation: ``body`` with ``fields``, to ``path``."""

    id: str
    label: str
    path: str
    confirmation: str
    method: Literal["POST", "PUT", "DELETE"] = "POST"
    body: dict[str, Any] | None = None
    fields: tuple[ActionField, ...] = ()
    dangerous: bool = False


class LastVerdict(DashboardRecord, frozen=True, kw_only=True):
    """The newest verdict about a member: the test compared ``distance`` with ``threshold``."""

    verdict: ShownVerdict
    at: float
    test: str = ""
    nonces: int | None = None
    distance: float | None = None
    threshold: float | None = None


class MemberRow(DashboardRecord, frozen=True, kw_only=True):
    """One member: a node, or a backend of a gateway.

    ``stalled_s`` is how long the engine has had work and not stepped; 0 while it steps or has
    nothing to do, None where that is not measured. ``rate`` is in nonces per second, for a backend
    in requests per second.
    """

    id: str
    name: str
    state: str
    level: Level = Level.GOOD
    reason: str = ""
    version: str = ""
    model: str = ""
    stalled_s: float | None = None
    rate: Trend | None = None
    chat_wait_s: float | None = None
    held_back_by: str = ""
    outbox_age_s: float | None = None
    verdict: LastVerdict | None = None
    in_flight: int | None = None
    connections: int | None = None
    faults: int | None = None
    facts: tuple[Fact, ...] = ()
    actions: tuple[ActionOffer, ...] = ()


class MemberPaging(DashboardRecord, frozen=True, kw_only=True):
    """Which members a snapshot has. ``levels`` counts all members, ``matching`` those asked for."""

    page: int
    pages: int
    matching: int
    total: int
    levels: dict[str, int]


class TimelineEvent(DashboardRecord, frozen=True, kw_only=True):
    at: float
    text: str
    level: Level = Level.GOOD


class RoundPanel(DashboardRecord, frozen=True, kw_only=True):
    """The running or the last round, its rate over time, and what happened in it."""

    id: str
    state: str
    started_at: float
    level: Level = Level.GOOD
    ended_at: float | None = None
    facts: tuple[Fact, ...] = ()
    events: tuple[TimelineEvent, ...] = ()
    rate: Trend | None = None
    rate_until: float | None = None
    """When the last value of ``rate`` was measured."""


class DistanceHistogram(DashboardRecord, frozen=True, kw_only=True):
    """Distances of verifications: ``counts[i]`` lie from ``edges[i]`` to ``edges[i + 1]``."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    threshold: float | None = None
    about: str = ""


class JobPanel(DashboardRecord, frozen=True, kw_only=True):
    """The queue of jobs. ``unit`` says what is counted, ``states`` counts by state."""

    unit: str
    queued: int
    limit: int | None = None
    oldest_s: float | None = None
    states: tuple[Fact, ...] = ()


class NamedTrend(DashboardRecord, frozen=True, kw_only=True):
    label: str
    unit: str
    trend: Trend


class BackendTraffic(DashboardRecord, frozen=True, kw_only=True):
    """Answers of one backend since the start. Times from the permit to the answer's first byte."""

    backend: str
    answers: int
    faults: int
    first_byte_p50_s: float | None = None
    first_byte_p95_s: float | None = None
    tokens: int = 0


class KeyTraffic(DashboardRecord, frozen=True, kw_only=True):
    """Requests of one client key since the start, and why those failed that did."""

    key: str
    in_flight: int
    requests: int
    errors: int
    codes: dict[str, int] = {}


class GatewayPanel(DashboardRecord, frozen=True, kw_only=True):
    """Load and answers of a gateway. ``waits`` is a histogram of waits for a permit, in seconds.

    ``waits`` has one count for each of ``wait_bounds`` and a last one for longer waits, of the last
    ``waits_over_s`` seconds. Keys beyond a limit are left out: ``keys_left_out`` says how many.
    """

    load: tuple[NamedTrend, ...]
    load_until: float
    wait_bounds: tuple[float, ...]
    waits: tuple[int, ...]
    waits_over_s: float
    backends: tuple[BackendTraffic, ...] = ()
    keys: tuple[KeyTraffic, ...] = ()
    keys_left_out: int = 0


class DashboardSnapshot(DashboardRecord, frozen=True, kw_only=True):
    """Everything that the page shows, as of ``at``.

    ``columns`` names the fields of members that this server has. A server hands over all members;
    ``paging`` is set where only one page of them is left.
    """

    kind: Literal["node", "gateway", "fleet"]
    title: str
    at: float
    version: str = ""
    note: str = ""
    figures: tuple[KeyFigure, ...] = ()
    columns: tuple[str, ...] = ()
    members: tuple[MemberRow, ...] = ()
    paging: MemberPaging | None = None
    round: RoundPanel | None = None
    distances: DistanceHistogram | None = None
    jobs: JobPanel | None = None
    gateway: GatewayPanel | None = None
    actions: tuple[ActionOffer, ...] = ()
