"""Callbacks of any database: their policy, which are posted next, and the store that keeps them."""

import asyncio
import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, ClassVar, Generic

from proofserve.outbox.database import C, D, StorePart, announces, kept, reads, writes
from proofserve.rounds.records import CompletedJob, DistanceVerdict, RoundSpec
from proofserve.rounds.status import OutboxGauges
from proofserve.wire import GENERATED, LOGGED, VALIDATED
from proofserve.wire.callbacks import callback
from proofserve.wire.records import ARTIFACT, DISTANCE, ROOTS, encoding_of

ENDPOINTS = (GENERATED, VALIDATED, LOGGED)


@dataclass(frozen=True, slots=True)
class Span:
    """The results ``first_seq`` .. ``last_seq`` of the round with this row number.

    A fleet numbers the callbacks of its members, and not each result.
    """

    round_number: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """One callback to POST to ``{url}/{endpoint}``.

    ``key`` never changes; ``sequence`` rises from 1 by 1 for each ``url``; ``attempts`` counts
    the failures so far. The body is made from ``span`` of the round ``round_id``; without a span it
    is stored.
    """

    id: int
    endpoint: str
    url: str
    key: str
    sequence: int
    attempts: int
    span: Span | None
    round_id: str | None = None


@dataclass(frozen=True, slots=True)
class CallbackPolicy:
    """The limits and times of callbacks. Times in seconds.

    A round's first callback is made ``interval_s`` after its first result, later ones at most once
    in each ``interval_s``, of at most ``max_artifacts`` or as many roots. A callback that failed
    ``max_retries`` times expires; with 0 it never expires. A target must answer within
    ``timeout_s``. The pause after a failure doubles from ``backoff_first_s`` to
    ``backoff_longest_s``. At least every ``look_again_s`` the sender reads the file again: another
    process may have made callbacks due.

    Raises ValueError for a number outside its range.
    """

    interval_s: float = 5.0
    max_artifacts: int = 1_000_000
    max_retries: int = 10
    max_concurrent: int = 10
    timeout_s: float = 10.0
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 30.0
    look_again_s: float = 5.0

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not (value > 0 or (value == 0 and field in {"interval_s", "max_retries"})):
                raise ValueError(f"{field} is {value}, which is too small")

    def pause_s(self, failures: int) -> float:
        """The pause after failure number ``failures`` = 1, 2, ... in a row."""
        # Bounded, so that the power stays a float; the longest pause is reached much earlier.
        return min(self.backoff_first_s * 2.0 ** min(failures - 1, 32), self.backoff_longest_s)

    def expires(self, failures: int) -> bool:
        return 0 < self.max_retries <= failures


@dataclass(frozen=True, slots=True)
class SendPlan:
    """``due`` has the callbacks to post now, at most one for each target.

    ``wait_s`` is the time until more are due, None if unknown. ``idle``: nothing is undelivered.
    """

    due: tuple[Delivery, ...]
    wait_s: float | None
    idle: bool


# A wait longer than its pause and this means that the clock was set back after the due time was
# stored; the callback is then due at once. Seconds.
_CLOCK_SLACK = 1.0


def wait_until(at: float, now: float, longest_s: float) -> float:
    """The seconds until ``at``; 0 also if they are more than the clock can explain."""
    wait_s = at - now
    return 0.0 if wait_s <= 0.0 or wait_s > longest_s + _CLOCK_SLACK else wait_s


# -- bodies ----------------------------------------------------------------------------------------


def callback_text(endpoint: str, body: Mapping[str, Any]) -> str:
    """The body as it is stored. Raises ValueError for an unknown endpoint, NaN and infinities."""
    if endpoint not in ENDPOINTS:
        raise ValueError(f"endpoint {endpoint!r} is not one of {', '.join(ENDPOINTS)}")
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def around_lists(spec: RoundSpec) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Of the body about a round (B.7, A.8): the kind of its lists, and the fields around them."""
    work, lane = spec.work, spec.lane
    head = {
        "public_key": work.public_key,
        "block_hash": work.block.hash,
        "block_height": work.block.height,
        "node_id": lane.node_id if lane else None,
    }
    if spec.target is not None:
        return DISTANCE, head, {"r_target": spec.target.r_target}
    encoding = {"encoding": encoding_of(work.scheme.width)}
    if lane is None or not spec.commits_roots:
        return ARTIFACT, head, encoding
    head |= asdict(lane) | {"round_id": spec.round_id}
    return (
        ROOTS,
        head,
        {"scheme": work.scheme.name, **encoding, "params": {"seq_len": work.seq_len}},
    )


def joined(
    head: Mapping[str, Any], pages: Sequence[Mapping[str, str]], tail: Mapping[str, Any]
) -> bytes:
    """A body: the members of ``head``, lists, the members of ``tail``.

    Each of ``pages`` has a part of every list, as JSON without its brackets.
    """
    lists = [f'"{name}":[{",".join(page[name] for page in pages)}]' for name in pages[0]]
    return f"{{{','.join([listed(head), *lists, listed(tail)])}}}".encode()


def listed(values: Mapping[str, Any] | Iterable[Any]) -> str:
    """JSON without the brackets around it."""
    whole = values if isinstance(values, Mapping) else list(values)
    return json.dumps(whole, separators=(",", ":"))[1:-1]


def listed_artifacts(vectors: Iterable[tuple[int, str]]) -> str:
    """As ``listed``, of nonces and their vectors in base64."""
    # By hand: the same as the JSON of artifact_record, in a third of its time.
    return ",".join(f'{{"nonce":{nonce},"vector_b64":"{text}"}}' for nonce, text in vectors)


# -- the store -------------------------------------------------------------------------------------

# ``{t}`` stands before the names of tables, ``{u}`` is what a span counts.
_ADD = """
    INSERT INTO {t}deliveries (round, first_{u}, last_{u}, body, endpoint, url, sequence,
                               idempotency_key, created_at, next_attempt_at)
    VALUES (:round, :first, :last, :body, :endpoint, :url, :sequence, :key, :now, :now)
"""
_CUT = "UPDATE {t}rounds SET cut_{u} = :through, interval_from = :now WHERE number = :round"
_BODY = "SELECT body FROM {t}deliveries WHERE id = :id"
# Unless another controller of a fleet has settled it.
_ACKNOWLEDGE = """
    UPDATE {t}deliveries SET attempts = attempts + 1, state = 'done', delivered_at = :now
    WHERE id = :id AND state = 'pending'
"""
_FAIL = """
    UPDATE {t}deliveries SET attempts = attempts + 1, last_error = :error, failed_at = :now,
                             state = :state, next_attempt_at = :next_attempt_at
    WHERE id = :id AND state = 'pending'
"""
_COUNTS = "SELECT state, count(*) FROM {t}deliveries GROUP BY state"
_RESULTS = "SELECT coalesce(sum(stored), 0) FROM {t}rounds"
_OLDEST = "SELECT min(created_at) FROM {t}deliveries WHERE state = 'pending'"
_LAST_ERROR = """
    SELECT last_error FROM {t}deliveries
    WHERE state IN ('pending', 'expired') AND failed_at IS NOT NULL
    ORDER BY failed_at DESC, id DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class UncutRound:
    """A round with the results ``span``, which are in no callback yet.

    They are due ``at_once``, or one interval after ``interval_from``.
    """

    span: Span
    url: str
    at_once: bool
    interval_from: float
    commits_roots: bool


class CallbackStore(StorePart[D], ABC, Generic[D, C]):
    """Where callbacks wait: what ``CallbackSender`` needs, and how others queue them.

    Methods raise OutboxUnavailable, and the sender calls them again. What follows the order of
    results is the same in every database; a subclass has the SQL that is not.
    """

    prefix: ClassVar[str]
    """What the names of its tables begin with."""
    unit: ClassVar[str]
    """What a span counts, in the names of columns."""
    next_sequence: ClassVar[str]
    """The next number of ``:url``. They rise in the order of commits, and none is used again."""
    deleted: ClassVar[str]
    """How many delivered callbacks are no rows any more, and how many expired were made due."""
    _failed_attempts = 0

    async def push(self, url: str, about: CompletedJob | DistanceVerdict) -> None:
        endpoint, body = callback(about)
        await self.enqueue(endpoint, url, body)

    @announces
    def enqueue(self, connection: C, endpoint: str, url: str, body: Mapping[str, Any]) -> None:
        """Queue one callback, due at once. Raises as ``callback_text``."""
        self.add(connection, endpoint, url, self.clock(), callback_text(endpoint, body))

    @writes
    def plan(
        self,
        connection: C,
        policy: CallbackPolicy,
        busy: frozenset[str] = frozenset(),
        flushing: bool = False,
    ) -> SendPlan:
        """Make the due callbacks, all if ``flushing``; choose those to post, none to ``busy``."""
        now = self.clock()
        waits: list[float] = []
        for each in self._uncut(connection):
            wait_s = wait_until(each.interval_from + policy.interval_s, now, policy.interval_s)
            if wait_s > 0.0 and not (each.at_once or flushing):
                waits.append(wait_s)
                continue
            spans = self._spans(connection, each, policy.max_artifacts)
            for span in spans:
                self.add(connection, GENERATED, each.url, now, span)
            through = (spans[-1] if spans else each.span).last_seq
            cut = {"round": each.span.round_number, "through": through, "now": now}
            self._run(connection, _CUT, cut)
        undelivered = bool(waits)
        due: list[Delivery] = []
        slots = policy.max_concurrent - len(busy)
        for at, first in self._firsts(connection):
            undelivered = True
            if first.url in busy:
                continue
            wait_s = wait_until(at, now, policy.backoff_longest_s)
            if wait_s > 0.0:
                waits.append(wait_s)
            elif len(due) < slots:
                # Without a free slot no wait is needed: the end of a post leads to a new plan.
                due.append(first)
        return SendPlan(tuple(due), min(waits, default=None), idle=not undelivered)

    async def body(self, delivery: Delivery) -> bytes:
        """The same bytes for each attempt."""
        stored = await self.database.read(self._stored_body, delivery)
        if stored is not None or delivery.span is None:
            return (stored or "").encode()
        span = delivery.span
        kind, head, tail = around_lists(await self.database.read(self._spec, span.round_number))
        pages, after = [], span.first_seq - 1
        while rows := await self.database.read(self._page, span, kind, after):
            after = rows[-1][0]
            # In a thread, as the next step: a body of a million artifacts takes a second.
            pages.append(await asyncio.to_thread(self._lists, rows, kind))
        return await asyncio.to_thread(joined, head, pages, tail)

    @writes
    def acknowledge(self, connection: C, delivery: Delivery) -> None:
        self._run(connection, _ACKNOWLEDGE, {"id": delivery.id, "now": self.clock()})

    async def fail(self, delivery: Delivery, error: str, pause_s: float | None) -> None:
        """Count a failed attempt; the next is due after ``pause_s``; None makes it expire."""
        now, state = self.clock(), "expired" if pause_s is None else "pending"
        # A target's error page may be large.
        values = {"id": delivery.id, "error": kept(error), "now": now, "state": state}
        values["next_attempt_at"] = now + (pause_s or 0.0)
        await self.database.write(lambda c: self._run(c, _FAIL, values))
        self._failed_attempts += 1

    @reads
    def gauges(self, connection: C) -> OutboxGauges:
        """The counters; ``last_error`` is the newest error of an undelivered callback."""

        def value(sql: str) -> Any:
            row = self._run(connection, sql, {}).fetchone()
            return None if row is None else row[0]

        counts = {row[0]: row[1] for row in self._run(connection, _COUNTS, {})}
        deleted, revived = self._run(connection, self.deleted, {}).fetchone()
        oldest = value(_OLDEST)
        return OutboxGauges(
            # PostgreSQL sums up to decimals.
            results=int(value(_RESULTS)),
            pending=counts.get("pending", 0),
            delivered=counts.get("done", 0) + deleted,
            expired=counts.get("expired", 0),
            oldest_pending_s=0.0 if oldest is None else max(0.0, self.clock() - oldest),
            last_error=value(_LAST_ERROR),
            revived=revived,
            failed_attempts=self._failed_attempts,
        )

    @classmethod
    def add(cls, connection: C, endpoint: str, url: str, now: float, about: str | Span) -> None:
        """Queue a callback in the caller's transaction, due at once: its body, or its results."""
        # A URL with and without a slash at its end has one sequence.
        url = url.rstrip("/")
        body, place = (about, (None,) * 3) if isinstance(about, str) else (None, astuple(about))
        values = dict(zip(("round", "first", "last"), place, strict=True))
        values |= {"body": body, "endpoint": endpoint, "url": url, "now": now}
        (sequence,) = cls._run(connection, cls.next_sequence, {"url": url}).fetchone()
        values |= {"sequence": sequence, "key": uuid.uuid4().hex}
        cls._run(connection, _ADD, values)

    @classmethod
    def _run(cls, connection: C, sql: str, values: Mapping[str, Any]) -> Any:
        return cls._execute(connection, sql.format(t=cls.prefix, u=cls.unit), values)

    def _stored_body(self, connection: C, delivery: Delivery) -> str | None:
        """None for a body that is made of results."""
        text: str | None = self._run(connection, _BODY, {"id": delivery.id}).fetchone()[0]
        return text

    @staticmethod
    @abstractmethod
    def _execute(connection: C, sql: str, values: Mapping[str, Any]) -> Any:
        """The cursor of a statement with named values."""

    @abstractmethod
    def _uncut(self, connection: C) -> Sequence[UncutRound]:
        """The rounds with a URL that may get a callback."""

    @abstractmethod
    def _spans(self, connection: C, of: UncutRound, most: int) -> Sequence[Span]:
        """The callbacks to make of ``of``, of at most ``most`` nonces or roots; none if empty."""

    @abstractmethod
    def _firsts(self, connection: C) -> Iterable[tuple[float, Delivery]]:
        """When the first undelivered callback of each URL is due, and that callback, by time."""

    @abstractmethod
    def _spec(self, connection: C, round_number: int) -> RoundSpec: ...

    @abstractmethod
    def _page(self, connection: C, span: Span, kind: str, after: int) -> Sequence[Any]:
        """The next rows of ``span`` behind number ``after``, which each row begins with."""

    @staticmethod
    @abstractmethod
    def _lists(rows: Sequence[Any], kind: str) -> Mapping[str, str]:
        """The lists of a body by name, as JSON without brackets."""
