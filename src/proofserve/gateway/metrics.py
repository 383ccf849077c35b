"""The gateway's counts and histograms, for Prometheus.

All counting happens in one event loop, so plain numbers are enough: they are ten times cheaper than
the library's counters with locks. The library renders the page.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

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

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        names = [*map(str, self._bounds), "+Inf"]
        counts = accumulate(self._counts)
        family.add_metric(labels, list(zip(names, counts, strict=True)), self._sum)


class Series:
    __slots__ = (
        "audio_seconds",
        "between",
        "completion_tokens",
        "duration",
        "first",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.first = Buckets(SECONDS)
        self.between = Buckets(SHORT_SECONDS)
        self.duration = Buckets(SECONDS)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.audio_seconds = 0


class GatewayTotals:
    def __init__(self) -> None:
        self.wait = Buckets(SHORT_SECONDS)
        self.outcomes: defaultdict[tuple[str, ...], int] = defaultdict(int)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.series: defaultdict[tuple[str, str], Series] = defaultdict(Series)

    def forget(self, backend: str) -> None:
        """Drop what was counted of a removed backend: addresses come and go without end."""
        for key in [each for each in self.series if each[0] == backend]:
            del self.series[key]


Values = Mapping[tuple[str, ...], float]
# Name, description, labels, and a function that reads the values at each scrape.
Gauge = tuple[str, str, list[str], Callable[[], Values]]


class GatewayCollector(Collector):
    """Shows totals and gauges. Scrapes run in a thread: dicts that may grow are copied first."""

    def __init__(self, totals: GatewayTotals, gauges: list[Gauge]) -> None:
        self._totals = totals
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        for name, text, labels, read in self._gauges:
            gauge = GaugeMetricFamily(f"gateway_{name}", text, labels=labels)
            yield _with_values(gauge, read())
        totals = self._totals
        outcomes = CounterMetricFamily(
            "gateway_requests", "Requests by outcome.", labels=["client", "outcome"]
        )
        yield _with_values(outcomes, totals.outcomes.copy())
        retries = CounterMetricFamily(
            "gateway_retries", "Attempts after the first, by reason.", labels=["reason"]
        )
        yield _with_values(retries, {(why,): n for why, n in totals.retries.copy().items()})
        wait = HistogramMetricFamily("gateway_queue_wait_seconds", "Time until the permit.")
        totals.wait.add_to(wait, [])
        yield wait
        yield from _by_model(totals.series.copy())


def _by_model(every: Mapping[tuple[str, str], Series]) -> Iterator[Metric]:
    labels = ["backend", "model"]
    tokens = CounterMetricFamily(
        "gateway_tokens", "Tokens that backends reported.", labels=[*labels, "kind"]
    )
    audio = CounterMetricFamily(
        "gateway_audio_seconds", "Seconds of sound that backends transcribed.", labels=labels
    )
    first = HistogramMetricFamily(
        "gateway_time_to_first_byte_seconds",
        "From the permit until the answer begins.",
        labels=labels,
    )
    between = HistogramMetricFamily(
        "gateway_time_between_chunks_seconds", "Between parts of a stream.", labels=labels
    )
    duration = HistogramMetricFamily(
        "gateway_duration_seconds", "From the permit to the end.", labels=labels
    )
    for key, series in every.items():
        tokens.add_metric([*key, "prompt"], series.prompt_tokens)
        tokens.add_metric([*key, "completion"], series.completion_tokens)
        audio.add_metric(list(key), series.audio_seconds)
        series.first.add_to(first, list(key))
        series.between.add_to(between, list(key))
        series.duration.add_to(duration, list(key))
    yield from (tokens, audio, first, between, duration)


def _with_values(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
