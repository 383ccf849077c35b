"""The gateway's metrics page."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from proofserve.gateway.gateway import Gateway
from proofserve.gateway.metrics import SECONDS, SHORT_SECONDS, GatewayTotals
from proofserve.gateway.records import BackendSpec, GatewayPlan

Samples = dict[tuple[str, tuple[str, ...]], float]


def shown(collector: Collector) -> Samples:
    """Samples by name and label values, in the order of the labels' names."""
    registry = CollectorRegistry()
    registry.register(collector)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            values = tuple(value for _, value in sorted(sample.labels.items()))
            samples[sample.name, values] = sample.value
    return samples


def test_a_new_gateway_shows_zeros() -> None:
    samples = shown(GatewayTotals())
    assert samples["gateway_queue_wait_seconds_count", ()] == 0
    assert set(samples.values()) == {0}


def test_outcomes_retries_and_tokens_are_counted_by_their_labels() -> None:
    totals = GatewayTotals()
    totals.outcomes["anna", "ok"] += 3
    totals.outcomes["unknown", "invalid_api_key"] += 1
    totals.retries["backend_error"] += 2
    series = totals.series["http://a", "tiny"]
    series.prompt_tokens += 5
    series.completion_tokens += 7
    samples = shown(totals)
    assert samples["gateway_requests_total", ("anna", "ok")] == 3
    assert samples["gateway_requests_total", ("unknown", "invalid_api_key")] == 1
    assert samples["gateway_retries_total", ("backend_error",)] == 2
    assert samples["gateway_tokens_total", ("http://a", "prompt", "tiny")] == 5
    assert samples["gateway_tokens_total", ("http://a", "completion", "tiny")] == 7


def test_label_values_are_quoted() -> None:
    totals = GatewayTotals()
    totals.outcomes['a"b\\c\nd — é', "ok"] += 1
    assert shown(totals)["gateway_requests_total", ('a"b\\c\nd — é', "ok")] == 1


@pytest.mark.anyio
async def test_gauges_are_read_at_each_scrape() -> None:
    gateway = Gateway(GatewayPlan((BackendSpec("http://a"), BackendSpec("http://b"))))
    a, b = (("http://a",), ("http://b",))
    gateway.pool.backends[1].draining = True
    first = shown(gateway)
    assert first["gateway_in_flight", ()] == 0
    assert (first["gateway_backend_up", a], first["gateway_backend_up", b]) == (1, 0)
    gateway.admission.in_use = 2
    assert shown(gateway)["gateway_in_flight", ()] == 2


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("time_to_first_byte", SECONDS),
        ("time_between_chunks", SHORT_SECONDS),
        ("duration", SECONDS),
    ],
)
def test_each_duration_has_its_histogram(name: str, bounds: tuple[float, ...]) -> None:
    totals = GatewayTotals()
    series = totals.series["http://a", "tiny"]
    short = {
        "time_to_first_byte": series.first,
        "time_between_chunks": series.between,
        "duration": series.duration,
    }
    short[name].observe(0.03)
    samples = shown(totals)
    for other in short:
        count = samples[f"gateway_{other}_seconds_count", ("http://a", "tiny")]
        assert count == (1 if other == name else 0)
    buckets = [key for key in samples if key[0] == f"gateway_{name}_seconds_bucket"]
    assert len(buckets) == len(bounds) + 1


def buckets_of(samples: Samples) -> list[tuple[float, float]]:
    found = [
        (float(values[0]), count)
        for (name, values), count in samples.items()
        if name == "gateway_queue_wait_seconds_bucket"
    ]
    return sorted(found)


@given(st.lists(st.one_of(st.floats(0, 20), st.sampled_from(SHORT_SECONDS)), max_size=50))
def test_a_bucket_counts_everything_up_to_its_bound(durations: list[float]) -> None:
    totals = GatewayTotals()
    for seconds in durations:
        totals.wait.observe(seconds)
    samples = shown(totals)
    assert buckets_of(samples) == [
        (bound, sum(seconds <= bound for seconds in durations))
        for bound in (*SHORT_SECONDS, math.inf)
    ]
    assert samples["gateway_queue_wait_seconds_count", ()] == len(durations)
    assert samples["gateway_queue_wait_seconds_sum", ()] == pytest.approx(sum(durations))


def test_counting_during_a_scrape_does_not_disturb_it(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = GatewayTotals()
    totals.outcomes["anna", "ok"] = totals.retries["backend_error"] = 1
    totals.series["http://a", "tiny"].prompt_tokens = 1
    add = CounterMetricFamily.add_metric

    def add_and_count_on(self: CounterMetricFamily, labels: list[str], value: float) -> None:
        fresh = str(len(totals.outcomes))
        totals.outcomes[fresh, "ok"] = totals.retries[fresh] = 1
        totals.series[fresh, "tiny"].prompt_tokens = 1
        add(self, labels, value)

    monkeypatch.setattr(CounterMetricFamily, "add_metric", add_and_count_on)
    assert shown(totals)["gateway_requests_total", ("anna", "ok")] == 1


def test_every_metric_has_a_help_text() -> None:
    totals: Any = GatewayTotals()
    totals.series["http://a", "tiny"].first.observe(1)
    for family in totals.collect():
        assert family.documentation.endswith(".")
        assert family.name.startswith("gateway_")
