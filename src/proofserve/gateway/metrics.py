"""The gateway's counts and histograms, for Prometheus.

All counting happens in one event loop, so plain numbers are enough: they are ten times cheaper than
the library's counters with locks. The library renders the page.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proofserve import web

# As the functions of ``web``; the name of every metric begins so.
counter, gauge = partial(web.counter, "gateway"), partial(web.gauge, "gateway")
histogram = partial(web.histogram, "gateway")

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Buckets:
    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    @property
    def counts(self) -> tuple[int, ...]:
        """One count for each bound, and a last one for what lies beyond."""
        return tuple(self._counts)

    @property
    def counted(self) -> tuple[tuple[int, ...], float]:
        return self.counts, self._sum


@dataclass(slots=True)
class Series:
    """What was counted of one model at one backend."""

    first: Buckets = field(default_factory=lambda: Buckets(SECONDS))
    between: Buckets = field(default_factory=lambda: Buckets(SHORT_SECONDS))
    duration: Buckets = field(default_factory=lambda: Buckets(SECONDS))
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_seconds: int = 0


class GatewayTotals(Collector):
    def __init__(self) -> None:
        self.wait = Buckets(SHORT_SECONDS)
        self.outcomes: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.series: defaultdict[tuple[str, str], Series] = defaultdict(Series)

    def forget(self, backend: str) -> None:
        """Drop what was counted of a removed backend: addresses come and go without end."""
        for key in [each for each in self.series if each[0] == backend]:
            del self.series[key]

    def collect(self) -> Iterator[Metric]:
        """Called in a thread: dicts that may grow are copied first."""
        outcomes = self.outcomes.copy()
        yield counter("requests", "Requests by outcome.", outcomes, "client", "outcome")
        retries = {(why,): count for why, count in self.retries.copy().items()}
        yield counter("retries", "Attempts after the first, by reason.", retries, "reason")
        text, wait = "Time until the permit.", {(): self.wait.counted}
        yield histogram("queue_wait_seconds", text, SHORT_SECONDS, wait)
        every, labels = self.series.copy(), ("backend", "model")
        tokens = {(*key, "prompt"): series.prompt_tokens for key, series in every.items()}
        tokens |= {(*key, "completion"): series.completion_tokens for key, series in every.items()}
        yield counter("tokens", "Tokens that backends reported.", tokens, *labels, "kind")
        audio = {key: series.audio_seconds for key, series in every.items()}
        text = "Seconds of sound that backends transcribed."
        yield counter("audio_seconds", text, audio, *labels)
        text = "From the permit until the answer begins."
        first = {key: series.first.counted for key, series in every.items()}
        yield histogram("time_to_first_byte_seconds", text, SECONDS, first, *labels)
        text = "Between parts of a stream."
        between = {key: series.between.counted for key, series in every.items()}
        yield histogram("time_between_chunks_seconds", text, SHORT_SECONDS, between, *labels)
        text = "From the permit to the end."
        duration = {key: series.duration.counted for key, series in every.items()}
        yield histogram("duration_seconds", text, SECONDS, duration, *labels)
