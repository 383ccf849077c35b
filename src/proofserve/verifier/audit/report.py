"""The report of an audit: a table and a page for readers, JSON for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rich import box
from rich.table import Table

from proofserve.reports import BLUE, GREEN, RED, drawn
from proofserve.verifier.audit.attacks import FARTHEST
from proofserve.verifier.audit.audit import WORTHWHILE, Audit, ProverResult
from proofserve.verifier.audit.deployment import Price
from proofserve.web import rendered

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Tests that can convict, by the names that simulations have for them.
TESTS: Final = ("paired", "direction")
COLUMNS: Final = (
    *("prover", "saves", "distance", "spread", "beyond", "count"),
    *TESTS,
    *("verify", "cleared", "no verdict", "verdict"),
)
# The others do not fit on a terminal of 80 columns.
ON_TERMINALS: Final = frozenset({"prover", "saves", "distance", *TESTS, "verify", "verdict"})
CAUGHT, MISSED, EXACT, HONEST, UNFIT = "CAUGHT", "NOT CAUGHT", "EXACT", "honest", "UNFIT"
UNEXPLAINED = "NO VERDICT"
COLOURS: Final = {
    **{CAUGHT: "green", HONEST: "green", MISSED: "red", UNFIT: "red"},
    **{EXACT: "yellow", UNEXPLAINED: "yellow"},
}
GOOD: Final = (CAUGHT, HONEST)

# Inches.
HEIGHT, ROW = 4.0, 0.28
# The left end of the logarithmic axis; smaller distances, zero too, are drawn there.
NEAREST: Final = 1e-4


@dataclass(frozen=True, slots=True)
class AuditReport:
    audit: Audit
    price: Price
    setup: Mapping[str, Any]
    machine: Mapping[str, str | int]
    beside: Mapping[str, Audit] = field(default_factory=dict)
    """By scheme, some attacks under another routing of experts; no part of the verdict."""

    def table(self) -> Table:
        """For a terminal: one row per prover, honest ones first; nonces as "median/power"."""
        title = f"audit of {self.setup['model']}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        table.add_column(COLUMNS[0], overflow="fold")
        for heading in COLUMNS[1:]:
            if heading in ON_TERMINALS:
                table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            *cells, verdict = (
                cell for name, cell in zip(COLUMNS, row, strict=True) if name in ON_TERMINALS
            )
            table.add_row(*cells, f"[{COLOURS[verdict]}]{verdict}[/]")
        return table

    @property
    def rows(self) -> list[tuple[str, ...]]:
        unfit = self.audit.unfit
        honest = [self._row(each, UNFIT if each is unfit else HONEST) for each in self.audit.honest]
        rows = [*honest, *(self._row(each, verdict_of(each)) for each in self.audit.attacks)]
        for scheme, audit in self.beside.items():
            rows.append(self._row(audit.honest[0], HONEST, scheme))
            rows += [self._row(each, verdict_of(each), scheme) for each in audit.attacks]
        return rows

    @property
    def missed(self) -> list[str]:
        """A sentence for each attack that is not caught: how near it is to honest vectors."""
        sentences = []
        for each in self.audit.attacks:
            if verdict_of(each) not in {MISSED, UNEXPLAINED}:
                continue
            measurement, endings = each.measurement, each.endings
            times = measurement.mean / self.audit.honest[0].measurement.mean
            text = f"{measurement.name}: {times:.2f} times as far as an honest node"
            if means := each.mean_cosines:
                nearest = int(np.argmax(means))
                text += f", cosine {means[nearest]:.2f} with {self.audit.suspects[nearest]}"
            convicted = endings.convicted / self.audit.runs
            sentences.append(
                f"{text}. Of the verifications {convicted:.1%} convict it,"
                f" {each.cleared_share:.1%} clear it, and {each.unexplained_share:.1%} find that"
                " nothing explains it."
            )
        return sentences

    @property
    def routing(self) -> str:
        """What the rows of ``beside`` are; empty without any."""
        return self._words("audit/audit_routing.html", schemes=self.beside)

    @property
    def cleared_first(self) -> str:
        """The attacks that verifications clear more often than they should, as one sentence."""
        most = 1.0 - self.audit.rule.power
        names = [
            f"{each.measurement.name} ({each.cleared_share:.0%})"
            for each in self.audit.attacks
            if each.cleared_share > most and not each.measurement.exact
        ]
        if not names:
            return "No verification that stops as soon as it knows clears an attack first."
        return (
            "A verification that stops as soon as it knows clears some of these before a test"
            f" convicts them: {', '.join(names)}."
        )

    @property
    def prices(self) -> str:
        """The price of a cleared lie; empty if it was not measured."""
        if not self.audit.prices:
            return ""
        found = "; ".join(each.text for each in self.audit.prices)
        return f"The price of a cleared lie, the most work saved at a sample of {found}."

    @property
    def honest_cleared(self) -> str:
        """What it takes to clear the honest kernel that is cleared last."""
        audit, power = self.audit, self.audit.rule.power
        slowest = max(audit.honest, key=lambda each: int(np.median(each.endings.cleared_at)))
        ended, endings = slowest.endings.cleared_at, slowest.endings
        most = endings.nonces_to(ended, power) or f"more than {audit.rule.max_nonces}"
        return (
            f"The honest prover that takes longest ({slowest.measurement.name}) is cleared by"
            f" {endings.nonces_to(ended, 0.5) or '-'} nonces (median), at most {most}."
        )

    @property
    def rule(self) -> str:
        """What is caught, and what is honest."""
        return self._words("audit/audit_rule.html", worthwhile=WORTHWHILE)

    @property
    def shortcuts(self) -> str:
        """The work that a prover can leave out without changing a vector."""
        return self._words("audit/audit_shortcuts.html", price=self.price)

    def _words(self, template: str, **values: object) -> str:
        made = rendered("proofserve.verifier", template, audit=self.audit, **values)
        return " ".join(made.split())

    def json(self) -> dict[str, Any]:
        audit = self.audit
        return {
            "passed": audit.passed,
            "verdict": audit.verdict,
            "rule": {**asdict(audit.rule), "dist_threshold": audit.dist_threshold},
            "rule_in_words": self.rule,
            "populations": list(audit.populations),
            "simulated_verifications": audit.runs,
            "suspects": list(audit.suspects),
            "honest": [self._record(each) for each in audit.honest],
            "attacks": [self._record(each) for each in audit.attacks],
            "price_of_a_cleared_lie": [asdict(each) for each in audit.prices],
            "beside": {
                scheme: [self._record(each) for each in (other.honest[0], *other.attacks)]
                for scheme, other in self.beside.items()
            },
            "exact_shortcuts": {
                "unread_mlp": self.price.unread_mlp,
                "unread_attention": self.price.unread_attention,
                "first_projections": self.price.first_projections
                if self.price.every_position
                else 0.0,
            },
            "multiplications_per_sequence": self.price.honest,
            "setup": dict(self.setup),
            "machine": dict(self.machine),
        }

    def _row(self, found: ProverResult, verdict: str, scheme: str = "") -> tuple[str, ...]:
        measurement = found.measurement
        return (
            f"{measurement.name}, {scheme}" if scheme else measurement.name,
            f"{measurement.saving:.1%}",
            f"{measurement.mean:.4f}",
            f"{measurement.sd:.4f}",
            f"{measurement.rate:.1%}",
            str(found.counted.fixed_nonces or "-"),
            *(self._nonces(found, name) for name in (*TESTS, "verify")),
            f"{found.cleared_share:.1%}",
            f"{found.unexplained_share:.1%}",
            verdict,
        )

    def _nonces(self, found: ProverResult, how: str) -> str:
        """ "-" for what does not convict in time."""
        median, at_power = self._needed(found, how).values()
        return "-" if median is None else f"{median}/{at_power or '-'}"

    def _needed(self, found: ProverResult, how: str) -> dict[str, int | None]:
        """After how many nonces half of the verifications, and most, have ended so."""
        endings = found.endings
        together = {"verify": endings.convicted_at, "cleared": endings.cleared_at}
        ended = {**endings.by_test, **together}[how]
        shares = {"median": 0.5, "at_power": self.audit.rule.power}
        return {name: endings.nonces_to(ended, share) for name, share in shares.items()}

    def _record(self, found: ProverResult) -> dict[str, Any]:
        measurement, distances = found.measurement, None
        if measurement.chances is None:
            # JSON has no infinity; a nonce without a vector has no distance.
            every = measurement.distances.tolist()
            distances = [each if np.isfinite(each) else None for each in every]
        return {
            "name": measurement.name,
            "saving": measurement.saving,
            "exact": measurement.exact,
            "distance_mean": measurement.mean,
            "distance_sd": measurement.sd,
            "mismatch_rate": measurement.rate,
            "mismatch_interval": list(measurement.interval),
            "distances": distances,
            "caught": found.caught,
            "count": asdict(found.counted),
            "nonces": {name: self._needed(found, name) for name in (*TESTS, "verify", "cleared")},
            "convicted": found.endings.convicted / self.audit.runs,
            "cleared": found.cleared_share,
            "no_verdict": found.unexplained_share,
            "cosines": found.mean_cosines,
        }


def verdict_of(found: ProverResult) -> str:
    if found.measurement.exact:
        return EXACT
    if found.caught:
        return CAUGHT
    return UNEXPLAINED if found.noticed else MISSED


def page(report: AuditReport) -> str:
    return rendered(
        "proofserve.verifier",
        "audit/audit_page.html",
        report=report,
        columns=COLUMNS,
        good=GOOD,
        distances=distances_plot(report.audit),
        convictions=convictions_plot(report.audit),
        facts=[*report.setup.items(), *report.machine.items()],
    )


def distances_plot(audit: Audit) -> str:
    """A row for each prover that was measured, honest ones at the top, and the threshold."""
    seen = [each.measurement for each in (*audit.honest, *audit.attacks)]
    rows = [(each.name, each.distances) for each in seen if each.chances is None]

    def draw(axes: "Axes") -> None:
        for height, (_, distances) in enumerate(rows):
            shown = np.clip(distances, NEAREST, FARTHEST)
            colour = GREEN if height < len(audit.honest) else BLUE
            axes.plot(shown, np.full(len(shown), height), "|", color=colour, alpha=0.5)
        axes.axvline(audit.dist_threshold, color=RED, linestyle="--")
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="distance from the validator's vector; dashed: the count's")

    return drawn([draw], ROW * len(rows) + 1.0)


def convictions_plot(audit: Audit) -> str:
    """A line for each prover: the share of its verifications that have convicted so far."""
    every = [(each, GREEN) for each in audit.honest]
    every += [(each, BLUE if each.caught else RED) for each in audit.attacks]

    def draw(axes: "Axes") -> None:
        for each, colour in every:
            stops = np.sort(each.endings.convicted_at)
            share = np.arange(1, len(stops) + 1) / len(stops)
            axes.step(stops, share, where="post", color=colour, alpha=0.6)
        axes.set(xscale="log", xlabel="nonces", xlim=(1, audit.rule.max_nonces), ylim=(0, 1))

    return drawn([draw], HEIGHT)
