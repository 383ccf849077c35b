"""Callbacks of any store: what one is, its policy, and which are posted next."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from proofserve.wire import GENERATED, LOGGED, VALIDATED

ENDPOINTS = (GENERATED, VALIDATED, LOGGED)


@dataclass(frozen=True, slots=True)
class Span:
    """The results ``first_seq`` .. ``last_seq`` of the round with this row number."""

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


def send_plan(
    targets: Iterable[tuple[str, float]],
    first_of: Callable[[str], Delivery],
    uncut: list[float],
    policy: CallbackPolicy,
    busy: frozenset[str],
    now: float,
) -> SendPlan:
    """Choose what to post, nothing to the URLs in ``busy``.

    ``targets``: each URL with undelivered callbacks, and when its first one, ``first_of``, is due.
    ``uncut``: the seconds until each round whose results wait for a callback gets one.
    """
    waits, undelivered = list(uncut), bool(uncut)
    due: list[Delivery] = []
    slots = policy.max_concurrent - len(busy)
    for url, at in targets:
        undelivered = True
        if url in busy:
            continue
        wait_s = wait_until(at, now, policy.backoff_longest_s)
        if wait_s > 0.0:
            waits.append(wait_s)
        elif len(due) < slots:
            # Without a free slot no wait is needed: the end of a post leads to a new plan.
            due.append(first_of(url))
    return SendPlan(tuple(due), min(waits, default=None), idle=not undelivered)


def callback_text(endpoint: str, body: Mapping[str, Any]) -> str:
    """The body as it is stored. Raises ValueError for an unknown endpoint, NaN and infinities."""
    if endpoint not in ENDPOINTS:
        raise ValueError(f"endpoint {endpoint!r} is not one of {', '.join(ENDPOINTS)}")
    return json.dumps(body, allow_nan=False, separators=(",", ":"))


def joined(
    head: Mapping[str, Any], pages: Iterable[Mapping[str, str]], tail: Mapping[str, Any]
) -> bytes:
    """A body: the members of ``head``, lists, the members of ``tail``.

    Each of ``pages`` has a part of every list, as JSON without its brackets.
    """
    every = list(pages)
    lists = [f'"{name}":[{",".join(page[name] for page in every)}]' for name in every[0]]
    return f"{{{','.join([listed(head), *lists, listed(tail)])}}}".encode()


def listed(values: Mapping[str, Any] | Iterable[Any]) -> str:
    """JSON without the brackets around it."""
    whole = values if isinstance(values, Mapping) else list(values)
    return json.dumps(whole, separators=(",", ":"))[1:-1]
