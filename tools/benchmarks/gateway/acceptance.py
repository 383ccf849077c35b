"""The limits of the gateway, and whether a run keeps them.

The limits in milliseconds were set on one machine. On a slower machine the ratio to vllm-router in
the same run counts instead. A machine counts as slower if vllm-router's figure is above its figure
on the first machine. The figure of `direct` says less, because other tools measure it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.gateway.contestants import NAIVE, NGINX, PROOFSERVE, VLLM_ROUTER
from benchmarks.gateway.readings import Results
from proofserve.reports import Limit

Verdict = Literal["PASS", "FAIL", "not run", "reached", "missed"]
NOT_WORSE = Limit(1.0, at_most=True)


@dataclass(frozen=True, slots=True)
class Judged:
    """A line of the acceptance with its verdict. An aim is reached or missed, and never fails."""

    text: str
    limit: str
    value: float | None
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True)
class Criterion:
    """A limit on our figure, which is divided by that of ``peer`` if one is named.

    ``router`` is vllm-router's figure where a limit in ``unit`` was set.
    """

    text: str
    scenario: str
    figure: str
    limit: Limit
    peer: str = ""
    aim: bool = False
    unit: str = ""
    router: float | None = None

    def judge(self, results: Results) -> Judged:
        if self.peer:
            value = results.ratio(self.scenario, self.figure, PROOFSERVE, self.peer)
            limit = f"{self.limit} x {self.peer}"
        else:
            value = results.median(self.scenario, PROOFSERVE, self.figure)
            limit = f"{self.limit} {self.unit}"
        verdict = _verdict(value, self.limit, self.aim)
        if verdict == "FAIL" and self._machine_is_slower(results):
            ratio = results.ratio(self.scenario, self.figure, PROOFSERVE, VLLM_ROUTER)
            if ratio is not None:
                note = f"slower machine: {ratio:.2f} x {VLLM_ROUTER} counts, {NOT_WORSE}"
                return Judged(self.text, limit, value, _verdict(ratio, NOT_WORSE), note)
        return Judged(self.text, limit, value, verdict)

    def _machine_is_slower(self, results: Results) -> bool:
        here = results.median(self.scenario, VLLM_ROUTER, self.figure)
        return self.router is not None and here is not None and here > self.router


def _at_most(
    bound: float, unit: str, text: str, scenario: str, figure: str, router: float | None = None
) -> Criterion:
    return Criterion(text, scenario, figure, Limit(bound, True), unit=unit, router=router)


CRITERIA: tuple[Criterion, ...] = (
    Criterion("requests/s, 32 at a time", "plain-32", "per_second", Limit(1.0), VLLM_ROUTER),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(1.0), VLLM_ROUTER),
    Criterion("requests/s, 32 at a time", "plain-32", "per_second", Limit(0.7), NGINX, aim=True),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(0.7), NGINX, aim=True),
    Criterion("p99 latency, 32 at a time", "plain-32", "latency_p99", NOT_WORSE, VLLM_ROUTER),
    Criterion("p99 latency, 100 at a time", "plain-100", "latency_p99", NOT_WORSE, VLLM_ROUTER),
    Criterion("requests/s, 100 at a time", "plain-100", "per_second", Limit(40.0), NAIVE),
    _at_most(0.2, "ms", "added delay p50, every 20 ms", "streams-20ms", "delay_p50", 0.10),
    _at_most(0.6, "ms", "added delay p99, every 20 ms", "streams-20ms", "delay_p99", 0.31),
    _at_most(1.1, "ms", "first byte p99, every 20 ms", "streams-20ms", "first_p99", 0.80),
    _at_most(1.2, "ms", "added delay p99, every 5 ms", "streams-5ms", "delay_p99", 0.82),
    Criterion("chunks/s without a gap", "streams-no-gap", "per_second", Limit(1.0), VLLM_ROUTER),
    _at_most(10.0, "ms", "added delay p99.9, five minutes", "long-20ms", "delay_p999"),
    _at_most(200.0, "MB", "memory at 1,000 open streams", "memory-1000", "rss_mb"),
)


def judge(results: Results) -> Iterator[Judged]:
    for criterion in CRITERIA:
        yield criterion.judge(results)
    errors = results.all_errors(PROOFSERVE)
    none = Limit(0, at_most=True)
    yield Judged("errors in all scenarios", str(none), errors, _verdict(errors, none))


def _verdict(value: float | None, limit: Limit, aim: bool = False) -> Verdict:
    if value is None:
        return "not run"
    if aim:
        return "reached" if limit.holds(value) else "missed"
    return "PASS" if limit.holds(value) else "FAIL"
