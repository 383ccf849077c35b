"""The page of a gateway, for operators: what this process does, now and in the newest minutes."""

import asyncio
import importlib.metadata
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

from proofserve.dashboard.records import (
    STEP_S,
    ActionOffer,
    BackendTraffic,
    DashboardSnapshot,
    Fact,
    GatewayPanel,
    History,
    KeyFigure,
    KeyTraffic,
    Level,
    MemberRow,
    NamedTrend,
    Trend,
)
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.gateway.backends import Backend
from proofserve.gateway.gateway import Gateway
from proofserve.gateway.metrics import SECONDS, SHORT_SECONDS

COLUMNS = ("rate", "in_flight", "connections", "faults")
# Keys that the page shows: those with most errors, then those with most requests.
_MOST_KEYS = 50
# Values of the load's chart: half an hour.
_CHART = 360
# Outcomes that are no errors: a client may leave its own stream.
_NO_ERRORS = frozenset({"ok", "client_left"})
# Steps over which waits and errors are counted: five minutes.
_RECENT_STEPS = 60


class LoadHistory:
    """Reads the counts of ``gateway`` every five seconds while ``watch`` runs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.in_flight, self.queued = History(), History()
        self.requests, self.errors, self.tokens = History(), History(), History()
        self._backends: dict[str, History] = {}
        self._counted: tuple[int, int, int] | None = None
        self._answered: Mapping[str, int] = {}
        self._waits: deque[tuple[int, ...]] = deque(maxlen=_RECENT_STEPS + 1)
        self._ended: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS + 1)
        self.measured_at = gateway.loop.time()
        """When the last values were taken, seconds of the loop's clock."""
        self.look()

    def feed(self) -> SnapshotFeed:
        read, gateway = partial(snapshot_of, self._gateway, self), self._gateway
        # The server waits for open streams once the last request has ended.
        return SnapshotFeed(read, lambda: gateway.draining and gateway.deadlines.idle.is_set())

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self.look()

    def look(self) -> None:
        gateway, now = self._gateway, self._gateway.loop.time()
        seconds = now - self.measured_at or STEP_S
        self.measured_at = now
        self.in_flight.add(gateway.admission.in_use)
        self.queued.add(gateway.admission.queued)
        requests, errors = self._requests()
        tokens = sum(s.prompt_tokens + s.completion_tokens for s in gateway.totals.series.values())
        counted, rates = (requests, errors, tokens), (self.requests, self.errors, self.tokens)
        for history, count, before in zip(rates, counted, self._counted or counted, strict=True):
            # The tokens of a backend go with it.
            history.add(max(0.0, (count - before) / seconds))
        answered = answers(gateway)
        # Backends that are found by a name come and go.
        self._backends = {name: self._backends.get(name) or History() for name in answered}
        for name, history in self._backends.items():
            history.add((answered[name] - self._answered.get(name, answered[name])) / seconds)
        self._counted, self._answered = counted, answered
        self._waits.append(gateway.totals.wait.counts)
        self._ended.append((requests, errors))

    def rate_of(self, backend: str) -> Trend:
        """Answers per second of a backend; no values yet if it has just come."""
        return self._backends.get(backend, History()).trend()

    def waits(self) -> tuple[int, ...]:
        """How many waits for a permit ended in each bucket, in the last five minutes."""
        first, last = self._waits[0], self._gateway.totals.wait.counts
        return tuple(new - old for new, old in zip(last, first, strict=True))

    def ended(self) -> tuple[int, int]:
        """Requests that ended in the last five minutes, and how many of them were errors."""
        requests, errors = self._requests()
        return requests - self._ended[0][0], errors - self._ended[0][1]

    @property
    def recent_s(self) -> float:
        """Seconds that ``waits`` and ``ended`` cover."""
        return (len(self._ended) - 1) * STEP_S + self._gateway.loop.time() - self.measured_at

    def _requests(self) -> tuple[int, int]:
        outcomes = self._gateway.totals.outcomes
        errors = sum(n for (_, outcome), n in outcomes.items() if outcome not in _NO_ERRORS)
        return sum(outcomes.values()), errors


def answers(gateway: Gateway) -> dict[str, int]:
    """Answers that began, by backend that the gateway has now."""
    found = dict.fromkeys((backend.name for backend in gateway.pool.backends), 0)
    for (name, _), series in gateway.totals.series.items():
        if name in found:
            found[name] += sum(series.first.counts)
    return found


async def snapshot_of(gateway: Gateway, history: LoadHistory) -> DashboardSnapshot:
    answered, note = answers(gateway), ""
    if (processes := gateway.plan.processes) > 1:
        note = f"This is one of {processes} processes of the gateway, with its own counts."
    if gateway.draining:
        note = "This gateway is shutting down: it refuses new requests and finishes the others."
    return DashboardSnapshot(
        kind="gateway",
        title="Gateway",
        at=time.time(),
        version=f"proofserve {importlib.metadata.version('proofserve')}",
        note=note,
        figures=tuple(_figures(gateway, history)),
        columns=COLUMNS,
        members=tuple(_member(b, history, answered[b.name]) for b in gateway.pool.backends),
        gateway=_panel(gateway, history),
    )


def _member(backend: Backend, history: LoadHistory, answered: int) -> MemberRow:
    state, level, reason = _state(backend)
    models = sorted(backend.models) if backend.models is not None else ["not listed yet"]
    return MemberRow(
        id=backend.name,
        name=backend.name,
        state=state,
        level=level,
        reason=reason,
        model=", ".join(models),
        rate=history.rate_of(backend.name),
        in_flight=backend.outstanding,
        connections=backend.pool.opened,
        faults=backend.fault_count,
        facts=(
            Fact(label="Weight", value=backend.spec.weight),
            Fact(label="Answers since the start", value=answered),
            Fact(label="Times it had to rest", value=backend.ejections),
        ),
        actions=(_drain(backend),),
    )


def _state(backend: Backend) -> tuple[str, Level, str]:
    if not backend.healthy:
        return "down", Level.BAD, "it does not answer the probe for its health"
    if backend.resting:
        return "rests", Level.BAD, "three faults in a row; one request tries it after its rest"
    if backend.draining:
        return "drained", Level.IDLE, "an operator drains it: it gets no new requests"
    return "up", Level.GOOD, ""


def _drain(backend: Backend) -> ActionOffer:
    name, drained = backend.name, backend.draining
    action, label, then = "drain", "Drain", "gets no new requests and finishes those that it has"
    if drained:
        action, label, then = "undrain", "Take back", "gets requests again"
    return ActionOffer(
        id=action,
        label=label,
        path=f"/admin/{action}",
        confirmation=f"{name} {then}.",
        body={"backend": name},
        dangerous=not drained,
    )


def _figures(gateway: Gateway, history: LoadHistory) -> Iterator[KeyFigure]:
    permits, requests = gateway.admission, history.requests.trend()
    rate = (requests.values or (None,))[-1]
    yield KeyFigure(label="Requests", value=rate, unit="/s", hint="that ended", trend=requests)
    full = Level.WARNING if permits.in_use >= permits.limit else Level.GOOD
    in_flight = history.in_flight.trend()
    yield KeyFigure(
        label="In flight", value=permits.in_use, of=permits.limit, level=full, trend=in_flight
    )
    level = Level.WARNING if permits.queued else Level.GOOD
    if permits.queued and permits.queued >= permits.queue_limit:
        level = Level.BAD
    waiting = history.queued.trend()
    yield KeyFigure(
        label="Waiting", value=permits.queued, of=permits.queue_limit, level=level, trend=waiting
    )
    covered = round(history.recent_s / 60)
    minutes = f"in the last {covered} min" if covered > 1 else "in the last minute"
    wait = quantile(SHORT_SECONDS, history.waits(), 0.95)
    yield KeyFigure(label="Wait, 95th percentile", value=wait, unit="s", hint=minutes)
    ended, errors = history.ended()
    # More than one in fifty deserves a look.
    level = Level.WARNING if errors > 0.02 * ended else Level.GOOD
    yield KeyFigure(label="Errors", value=errors, of=ended, hint=minutes, level=level)
    tokens = history.tokens.trend()
    yield KeyFigure(label="Tokens", value=(tokens.values or (None,))[-1], unit="/s", trend=tokens)


def _panel(gateway: Gateway, history: LoadHistory) -> GatewayPanel:
    keys = sorted(_keys(gateway), key=lambda key: (-key.errors, -key.requests, key.key))
    since = time.time() - gateway.loop.time()
    return GatewayPanel(
        load=(
            NamedTrend(label="In flight", unit="", trend=history.in_flight.trend(_CHART)),
            NamedTrend(label="Waiting", unit="", trend=history.queued.trend(_CHART)),
            NamedTrend(label="Requests", unit="/s", trend=history.requests.trend(_CHART)),
            NamedTrend(label="Errors", unit="/s", trend=history.errors.trend(_CHART)),
        ),
        load_until=history.measured_at + since,
        wait_bounds=SHORT_SECONDS,
        waits=history.waits(),
        waits_over_s=history.recent_s,
        backends=tuple(_traffic(gateway, each) for each in gateway.pool.backends),
        keys=tuple(keys[:_MOST_KEYS]),
        keys_left_out=max(0, len(keys) - _MOST_KEYS),
    )


def _traffic(gateway: Gateway, backend: Backend) -> BackendTraffic:
    series = [s for (name, _), s in gateway.totals.series.items() if name == backend.name]
    first = tuple(map(sum, zip(*(each.first.counts for each in series), strict=True)))
    return BackendTraffic(
        backend=backend.name,
        answers=sum(first),
        faults=backend.fault_count,
        first_byte_p50_s=quantile(SECONDS, first, 0.5),
        first_byte_p95_s=quantile(SECONDS, first, 0.95),
        tokens=sum(each.prompt_tokens + each.completion_tokens for each in series),
    )


def _keys(gateway: Gateway) -> Iterator[KeyTraffic]:
    by_key: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (key, outcome), count in gateway.totals.outcomes.items():
        by_key[key][outcome] += count
    clients = {client.name: client for client in gateway.clients.all()}
    # The totals count a request that a limit refused as of an unknown key.
    for name, client in clients.items():
        by_key[name] += client.refused
        by_key["unknown"] -= client.refused
    for key, outcomes in by_key.items():
        errors = {outcome: n for outcome, n in outcomes.items() if outcome not in _NO_ERRORS}
        if key in clients or outcomes:
            yield KeyTraffic(
                key=key,
                in_flight=clients[key].in_flight if key in clients else 0,
                requests=outcomes.total(),
                errors=sum(errors.values()),
                codes=errors,
            )


def quantile(bounds: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """The value below which ``part`` of what was counted lies, even within a bucket.

    ``counts`` has one count for each upper bound and a last one beyond, which counts as at the last
    bound. None without counts.
    """
    if not sum(counts):
        return None
    wanted = part * sum(counts)
    before = 0
    for bucket, total in enumerate(accumulate(counts)):
        if total >= wanted and bucket < len(bounds):
            low = bounds[bucket - 1] if bucket else 0.0
            return low + (bounds[bucket] - low) * (wanted - before) / counts[bucket]
        before = total
    return bounds[-1]
