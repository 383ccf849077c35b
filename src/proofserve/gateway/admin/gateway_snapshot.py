"""What the gateway's page shows, read from the gateway of this process."""

import importlib.metadata
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from proofserve.dashboard.records import (
    ActionOffer,
    BackendTraffic,
    DashboardSnapshot,
    Fact,
    GatewayPanel,
    KeyFigure,
    KeyTraffic,
    Level,
    MemberRow,
    NamedTrend,
)
from proofserve.gateway.admin.load_history import LoadHistory, answers, is_error
from proofserve.gateway.backends.fleet import Backend
from proofserve.gateway.metrics import SECONDS, SHORT_SECONDS
from proofserve.gateway.relay.gateway import Gateway

COLUMNS = ("rate", "in_flight", "connections", "faults")
# Keys that the page shows: those with most errors, then those with most requests.
_MOST_KEYS = 50
# Of requests that no client was found for.
_UNKNOWN = "unknown"
# Values of the load's chart: half an hour.
_CHART = 360
# A share of errors above which an operator should look.
_MANY_ERRORS = 0.02


async def snapshot_of(gateway: Gateway, history: LoadHistory) -> DashboardSnapshot:
    backends = gateway.fleet.backends
    answered = answers(gateway)
    return DashboardSnapshot(
        kind="gateway",
        title="Gateway",
        at=time.time(),
        version=f"proofserve {importlib.metadata.version('proofserve')}",
        note=_note(gateway),
        figures=tuple(_figures(gateway, history)),
        columns=COLUMNS,
        members=tuple(_member(each, history, answered[each.name]) for each in backends),
        gateway=_panel(gateway, history, answered),
    )


def _note(gateway: Gateway) -> str:
    if gateway.draining:
        return "This gateway is shutting down: it refuses new requests and finishes the others."
    if (processes := gateway.plan.processes) > 1:
        return f"This is one of {processes} processes of the gateway, with its own counts."
    return ""


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
    body: dict[str, Any] = {"backend": backend.name}
    if backend.draining:
        return ActionOffer(
            id="undrain",
            label="Take back",
            path="/admin/undrain",
            confirmation=f"{backend.name} gets requests again.",
            body=body,
        )
    return ActionOffer(
        id="drain",
        label="Drain",
        path="/admin/drain",
        confirmation=f"{backend.name} gets no new requests and finishes those that it has.",
        body=body,
        dangerous=True,
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
    level = Level.WARNING if errors > _MANY_ERRORS * ended else Level.GOOD
    yield KeyFigure(label="Errors", value=errors, of=ended, hint=minutes, level=level)
    tokens = history.tokens.trend()
    yield KeyFigure(label="Tokens", value=(tokens.values or (None,))[-1], unit="/s", trend=tokens)


def _panel(gateway: Gateway, history: LoadHistory, answered: dict[str, int]) -> GatewayPanel:
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
        backends=tuple(_traffic(gateway, each, answered) for each in gateway.fleet.backends),
        keys=tuple(keys[:_MOST_KEYS]),
        keys_left_out=max(0, len(keys) - _MOST_KEYS),
    )


def _traffic(gateway: Gateway, backend: Backend, answered: dict[str, int]) -> BackendTraffic:
    series = [s for (name, _), s in gateway.totals.series.items() if name == backend.name]
    first = tuple(map(sum, zip(*(each.first.counts for each in series), strict=True)))
    return BackendTraffic(
        backend=backend.name,
        answers=answered[backend.name],
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
        by_key[_UNKNOWN] -= client.refused
    for key, outcomes in by_key.items():
        errors = {outcome: n for outcome, n in outcomes.items() if is_error(outcome)}
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
