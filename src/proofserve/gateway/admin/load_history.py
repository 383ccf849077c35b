"""What the gateway's page shows of the past: load, waits and errors of the newest minutes."""

import asyncio
from collections import deque
from collections.abc import Mapping

from proofserve.dashboard.records import STEP_S, History, Trend
from proofserve.gateway.relay.gateway import Gateway

# Outcomes that are no errors: a client may leave its own stream.
_NO_ERRORS = frozenset({"ok", "client_left"})
# Steps over which waits and errors are counted: five minutes.
_RECENT_STEPS = 60


class LoadHistory:
    """Reads the counts of ``gateway`` every five seconds while ``watch`` runs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.in_flight = History()
        self.queued = History()
        self.requests = History()
        self.errors = History()
        self.tokens = History()
        self._backends: dict[str, History] = {}
        self._counted: Mapping[str, float] = {}
        self._answered: Mapping[str, int] = {}
        self._waits: deque[tuple[int, ...]] = deque(maxlen=_RECENT_STEPS + 1)
        self._ended: deque[tuple[int, int]] = deque(maxlen=_RECENT_STEPS + 1)
        self.measured_at = gateway.loop.time()
        """When the last values were taken, seconds of the loop's clock."""
        self.look()

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
        counted = {"requests": requests, "errors": errors, "tokens": tokens}
        rates = {"requests": self.requests, "errors": self.errors, "tokens": self.tokens}
        for name, history in rates.items():
            new = counted[name] - self._counted.get(name, counted[name])
            # The tokens of a backend go with it.
            history.add(max(0.0, new / seconds))
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
        errors = sum(n for (_, outcome), n in outcomes.items() if is_error(outcome))
        return sum(outcomes.values()), errors


def is_error(outcome: str) -> bool:
    return outcome not in _NO_ERRORS


def answers(gateway: Gateway) -> dict[str, int]:
    """Answers that began, by backend that the gateway has now."""
    found = dict.fromkeys((backend.name for backend in gateway.fleet.backends), 0)
    for (name, _), series in gateway.totals.series.items():
        if name in found:
            found[name] += sum(series.first.counts)
    return found
