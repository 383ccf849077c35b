"""What the ledger says of all nodes: a table, a page, metrics for Prometheus, and JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Metric, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from rich import box
from rich.table import Table

from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.validation.ledger import LedgerStanding
from proofserve.verifier.validation.run import ValidationPlan
from proofserve.web import rendered

_HEADINGS = (
    "node",
    "model",
    "newest",
    "when",
    "honest",
    "fraud",
    "unproved",
    "other",
    "alpha left",
)


@dataclass(frozen=True, eq=False)
class ValidationReport(Collector):
    """The newest outcome of each node, and how many of each there are; ``at`` is Unix time."""

    plan: ValidationPlan
    standings: Mapping[str, LedgerStanding]
    at: float

    def rows(self) -> list[list[str]]:
        """A row of each node, in the order of ``nodes.toml``."""
        found = []
        for node, model in self.plan.nodes.items():
            of = self.standings[node]
            named = [of.counts.get(each, 0) for each in ("honest", "fraud", "unproved")]
            other = sum(of.counts.values()) - sum(named)
            newest = f"{of.outcome} ({of.kind})" if of.kind else of.outcome or "none yet"
            left = f"{max(0.0, self.plan.alpha - of.alpha_spent):.3g}"
            counts = [str(each) for each in (*named, other)]
            found.append([node, model, newest, _time(of.ended_at), *counts, left])
        return found

    def table(self) -> Table:
        """For a terminal."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading in _HEADINGS:
            table.add_column(heading, no_wrap=heading not in {"node", "newest"}, overflow="fold")
        for row in self.rows():
            table.add_row(*row)
        return table

    def record(self) -> dict[str, object]:
        """For programs."""
        return {
            "at": self.at,
            "alpha": self.plan.alpha,
            "nodes": {
                node: {"model": model, **asdict(self.standings[node])}
                for node, model in self.plan.nodes.items()
            },
        }

    def write(self) -> None:
        """The page and the metrics, if the plan has places for them. Raises OSError."""
        if (page := self.plan.page) is not None:
            reasons = {node: of.reason or "" for node, of in self.standings.items()}
            facts = {"made (UTC)": _time(self.at), "ledger": self.plan.ledger}
            facts["alpha of a year, of each node"] = f"{self.plan.alpha:g}"
            text = rendered(
                "proofserve.verifier",
                "validation/validation_page.html",
                headings=_HEADINGS,
                rows=self.rows(),
                reasons=reasons,
                facts=facts.items(),
            )
            beside = page.with_name(f"{page.name}.new")
            beside.write_text(text, encoding="utf-8")
            # A reader never sees a half.
            beside.replace(page)
        if self.plan.metrics is not None:
            registry = CollectorRegistry()
            registry.register(self)
            write_to_textfile(str(self.plan.metrics), registry)

    def collect(self) -> Iterator[Metric]:
        """Metrics by the ledger alone, so that counters go on in the next call."""
        prefix, labels = "proofserve_validate", ("node", "model")
        of_outcomes = (*labels, "outcome")
        ended, text = f"{prefix}_challenges", "Challenges that ended, by outcome."
        challenges = CounterMetricFamily(ended, text, labels=of_outcomes)
        left = GaugeMetricFamily(f"{prefix}_alpha_left", "Of a year's alpha.", labels=labels)
        name, text = f"{prefix}_last_timestamp_seconds", "When the newest challenge ended."
        newest = GaugeMetricFamily(name, text, labels=of_outcomes)
        for each in self.plan.nodes.items():
            of = self.standings[each[0]]
            for outcome in SequentialResult:
                challenges.add_metric((*each, outcome), of.counts.get(outcome, 0))
            left.add_metric(each, max(0.0, self.plan.alpha - of.alpha_spent))
            if of.outcome is not None:
                newest.add_metric((*each, of.outcome), of.ended_at or 0.0)
        yield from (challenges, left, newest)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%m-%d %H:%M}"
