"""What the ledger says of all nodes: a table, a page, metrics for Prometheus, and JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, Counter, Gauge, write_to_textfile
from rich import box
from rich.table import Table

from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.validation.ledger import LedgerStanding
from proofserve.verifier.validation.run import ValidationPlan
from proofserve.web import rendered

_HEADINGS = (
    "node",
    "model",
    "newest",
    "when (UTC)",
    "honest",
    "fraud",
    "unproved",
    "other",
    "alpha left",
)


@dataclass(frozen=True, slots=True)
class ValidationReport:
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
            table.add_column(heading, overflow="fold")
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
            write_to_textfile(str(self.plan.metrics), self.registry())

    def registry(self) -> CollectorRegistry:
        """By the ledger alone, so that counters go on after a restart."""
        registry, labels = CollectorRegistry(), ("node", "model")
        prefix = "proofserve_validate"
        challenges = Counter(
            f"{prefix}_challenges",
            "Challenges that ended, by outcome.",
            (*labels, "outcome"),
            registry=registry,
        )
        left = Gauge(f"{prefix}_alpha_left", "Of a year's alpha.", labels, registry=registry)
        newest = Gauge(
            f"{prefix}_last_timestamp_seconds",
            "When the newest challenge ended.",
            (*labels, "outcome"),
            registry=registry,
        )
        for node, model in self.plan.nodes.items():
            of = self.standings[node]
            for outcome in SequentialResult:
                challenges.labels(node, model, outcome).inc(of.counts.get(outcome, 0))
            left.labels(node, model).set(max(0.0, self.plan.alpha - of.alpha_spent))
            if of.outcome is not None and of.ended_at is not None:
                newest.labels(node, model, of.outcome).set(of.ended_at)
        return registry


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
