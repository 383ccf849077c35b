"""The Prometheus metrics of a fleet, beside those that a node has; nothing is kept for them."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proofserve.fleet.reconciling.reconciler import PassTimes
from proofserve.fleet.records import MemberState
from proofserve.fleet.sql.leadership import Leadership
from proofserve.fleet.verification_records import JobPhase, VerdictOutcome
from proofserve.fleet.watch import FleetWatch, Overview

PREFIX = "proofserve_fleet"


class FleetCollector(Collector):
    """Shows what ``watch`` knows; it may be read in any thread."""

    def __init__(self, watch: FleetWatch, leadership: Leadership, passes: PassTimes) -> None:
        self._watch = watch
        self._leadership = leadership
        self._passes = passes

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        overview = self._watch.current
        states = Counter(each.state for each in overview.members)
        members = GaugeMetricFamily(f"{PREFIX}_members", "Members by state.", labels=["state"])
        for state in MemberState:
            members.add_metric([state.value], states[state])
        yield members
        round_ = overview.desired.round
        lanes = GaugeMetricFamily(
            f"{PREFIX}_lanes", "Lanes of the newest round: given, and left.", labels=["lane"]
        )
        given = len(overview.view.lanes)
        lanes.add_metric(["given"], given)
        lanes.add_metric(["left"], (round_.lanes if round_ else 0) - given)
        yield lanes
        leads = "1 for the controller that acts on the members."
        yield GaugeMetricFamily(f"{PREFIX}_leads", leads, value=self._leadership.held)
        yield from _verification(overview)
        age = "Seconds since the database was read."
        yield GaugeMetricFamily(f"{PREFIX}_view_age_seconds", age, value=self._watch.age_s)
        passes = GaugeMetricFamily(
            f"{PREFIX}_pass_seconds",
            "Duration of a pass over all members: the last one, and the longest of this process.",
            labels=["pass"],
        )
        passes.add_metric(["last"], self._passes.last_s)
        passes.add_metric(["longest"], self._passes.longest_s)
        yield passes


def _verification(overview: Overview) -> Iterator[Metric]:
    seen = overview.verification
    jobs = GaugeMetricFamily(
        f"{PREFIX}_verification_jobs",
        "Jobs of verification by state; failed ones of the last day.",
        labels=["state"],
    )
    for job_state in (JobPhase.QUEUED, JobPhase.RUNNING, JobPhase.FAILED):
        jobs.add_metric([job_state.value], seen.jobs.get(job_state, 0))
    yield jobs
    # One number for what starts workers: it must not end one that runs a job.
    open_jobs = sum(seen.jobs.get(each, 0) for each in (JobPhase.QUEUED, JobPhase.RUNNING))
    waiting = "Jobs of verification that are queued or running."
    yield GaugeMetricFamily(f"{PREFIX}_open_jobs", waiting, value=open_jobs)
    verdicts = CounterMetricFamily(
        f"{PREFIX}_verdicts", "Verdicts about members by outcome.", labels=["outcome"]
    )
    for outcome in VerdictOutcome:
        verdicts.add_metric([outcome.value], seen.outcomes.get(outcome, 0))
    yield verdicts


def registry(watch: FleetWatch, leadership: Leadership, passes: PassTimes) -> CollectorRegistry:
    made = CollectorRegistry()
    made.register(FleetCollector(watch, leadership, passes))
    return made
