"""The report of an audit: a table and sentences for readers, JSON for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich import box
from rich.table import Table

from proofserve.lab.audit.bootstrap import CERTIFIED, DIRECTION, PAIRED, RANK, SCALE, TWINS
from proofserve.lab.audit.compute_share import Price
from proofserve.lab.audit.measurement import ProverMeasurement
from proofserve.lab.audit.results import WORTHWHILE, Audit, ProverResult

# In the order of the columns.
TESTS: Final = (PAIRED, SCALE, RANK, DIRECTION, CERTIFIED, TWINS)
COLUMNS: Final = (
    *("prover", "saves", "distance", "spread", "beyond", "count"),
    *TESTS,
    *("cleared", "verdict"),
)
# The others do not fit on a terminal of 80 columns; of the tests the default ones do.
ON_TERMINALS: Final = frozenset({"prover", "saves", "distance", "count", "verdict"})
CAUGHT, MISSED, EXACT, HONEST, UNFIT = "CAUGHT", "NOT CAUGHT", "EXACT", "honest", "UNFIT"
COLOURS: Final = {CAUGHT: "green", HONEST: "green", MISSED: "red", UNFIT: "red", EXACT: "yellow"}
GOOD: Final = (CAUGHT, HONEST)

ASSUMPTIONS = (
    "A saving is the share of multiplications that the attack leaves out of an honest nonce."
    " Weights of fewer bits count as cheaper in proportion to their bits, which is the most that"
    " hardware offers. Hardware does so only with rounded activations too, which would move the"
    " vectors further. Vectors of another nonce, key or block exist already and cost nothing.",
    "Weights are rounded as the prover's name says; the attack computes everything else honestly."
    " Weights by chance are rounded up or down at random, so that no suspect predicts them.",
    "Honest vectors differ from the validator's because the prover computes in a dtype that rounds"
    " more. Two machines that both round, each in its own way, are about 1.4 times as far apart;"
    " the scale test allows for that.",
    "Nonces are those of simulated verifications, which draw the measured nonces again and again:"
    " they know no prover's vector that was not measured. They compare every nonce with every"
    " suspect, and follow the likeliest. `verify` compares a nonce with a few suspects at a time,"
    " so over a large bank its direction test takes some nonces more, and clears later.",
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    audit: Audit
    price: Price
    setup: Mapping[str, Any]
    machine: Mapping[str, str | int]

    def table(self) -> Table:
        """For a terminal: one row per prover, honest ones first; nonces as "median/power"."""
        title = f"audit of {self.setup['model']}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        table.add_column(COLUMNS[0], overflow="fold")
        shown = ON_TERMINALS.union(self.audit.honest[0].tests.default)
        for heading in COLUMNS[1:]:
            if heading in shown:
                table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            *cells, verdict = (
                cell for name, cell in zip(COLUMNS, row, strict=True) if name in shown
            )
            table.add_row(*cells, f"[{COLOURS[verdict]}]{verdict}[/]")
        return table

    @property
    def rows(self) -> list[tuple[str, ...]]:
        unfit = self.audit.unfit
        honest = [_row(each, UNFIT if each is unfit else HONEST) for each in self.audit.honest]
        return [*honest, *(_row(each, verdict_of(each)) for each in self.audit.attacks)]

    @property
    def missed(self) -> list[str]:
        """A sentence for each attack that is not caught: how near it is to honest vectors."""
        return [self._missed(each) for each in self.audit.attacks if verdict_of(each) == MISSED]

    @property
    def cleared_first(self) -> str:
        """The attacks that verifications clear more often than they should, as one sentence."""
        most = 1.0 - self.audit.rule.power
        names = [
            f"{each.measurement.name} ({each.tests.cleared.share:.0%})"
            for each in self.audit.attacks
            if each.tests.cleared.share > most and not each.measurement.exact
        ]
        if not names:
            return "No verification that stops as soon as it knows clears an attack first."
        return (
            "A verification that stops as soon as it knows clears some of these before a test"
            f" convicts them: {', '.join(names)}."
        )

    @property
    def honest_cleared(self) -> str:
        cleared = self.audit.honest[0].tests.cleared
        most = cleared.at_power or f"more than {self.audit.rule.max_nonces}"
        return (
            f"An honest node is cleared by {cleared.median or '-'} nonces (median), at most {most}."
        )

    @property
    def rule(self) -> str:
        audit = self.audit
        rule, default = audit.rule, ", ".join(audit.honest[0].tests.default)
        return (
            f"An attack is CAUGHT if one of the tests that `verify` runs by default here"
            f" ({default}) convicts it with a chance of {rule.power:g} or more within"
            f" {rule.max_nonces} nonces, and all together an honest node with {rule.alpha:g} or"
            " less. The table shows the nonces after which a test has convicted half of the"
            f" {audit.runs} simulated verifications, and {rule.power:.1%} of them. The default"
            " tests share that alpha; the others, of them certified (the direction test without"
            " a calibration), have all of it."
            f" The count calls a vector a mismatch if it is further than"
            f" {audit.dist_threshold:.4g} from the validator's; an honest node may have mismatches"
            f" in {rule.p_mismatch:g} of its nonces. It is the exact binomial test, at the lower"
            " end of the 95 % interval of the rate. The other tests rest on"
            f" {audit.pairs} honest distances, which carry a chance of {1 / audit.pairs:.2g} by"
            " themselves; 1000 carry any. The audit fails if an attack that saves"
            f" {WORTHWHILE:.0%} or more is not caught, or if an honest node would be convicted."
        )

    @property
    def shortcuts(self) -> str:
        """The work that a prover can leave out without changing a vector."""
        price = self.price
        begin = (
            "An exact shortcut leaves work out and gives the same vectors, so no validator can see"
            " it. "
        )
        if price.every_position:
            return begin + (
                "The first layer's queries, keys and values depend on the token alone, so a prover"
                f" can keep them for each token: {price.first_projections:.1%} of a forward. Its"
                " vectors are right, so it is not caught and is no fraud."
            )
        return begin + (
            "Every scheme of version 1 reads only the last position. In the last layer the MLP"
            f" at the other positions is {price.unread_mlp:.1%} of a whole forward. Our servers"
            " leave it out, and savings are shares of the rest. The last layer's queries,"
            f" scores and output projections at those positions are a further"
            f" {price.unread_attention:.1%}; a prover may leave them out and stay honest."
        )

    def json(self) -> dict[str, Any]:
        audit = self.audit
        return {
            "passed": audit.passed,
            "verdict": audit.verdict,
            "rule": {**asdict(audit.rule), "dist_threshold": audit.dist_threshold},
            "rule_in_words": self.rule,
            "honest_pairs": audit.pairs,
            "simulated_verifications": audit.runs,
            "suspects": list(audit.suspects),
            "honest": [self._record(each) for each in audit.honest],
            "attacks": [self._record(each) for each in audit.attacks],
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

    def _missed(self, found: ProverResult) -> str:
        measurement = found.measurement
        times = measurement.mean / self.audit.honest[0].measurement.mean
        share = max(each.share for each in found.tests.tests.values())
        text = f"{measurement.name}: {times:.2f} times as far as an honest prover"
        if (nearest := strongest(found, self.audit.suspects)) is not None:
            text += f", cosine {nearest[1]:.2f} with {nearest[0]}"
        return f"{text}; a test convicts {share:.1%} of the verifications."

    def _record(self, found: ProverResult) -> dict[str, Any]:
        quickest = found.counted.sequential
        return {
            **_measurement(found.measurement),
            "caught": found.caught,
            "count": {
                "fixed_nonces": found.counted.fixed,
                "sequential": asdict(quickest) if quickest else None,
                "default_sequential_convicts": found.counted.default_convicts,
            },
            "tests": {name: asdict(each) for name, each in found.tests.tests.items()},
            "cleared": asdict(found.tests.cleared),
            "cosines": found.mean_cosines,
        }


def verdict_of(found: ProverResult) -> str:
    if found.measurement.exact:
        return EXACT
    return CAUGHT if found.caught else MISSED


def strongest(found: ProverResult, suspects: tuple[str, ...]) -> tuple[str, float] | None:
    """The suspect with the largest mean cosine, and that; None where there is none."""
    means = found.mean_cosines
    if not means:
        return None
    index = int(np.argmax(means))
    return suspects[index], means[index]


def _row(found: ProverResult, verdict: str) -> tuple[str, ...]:
    measurement, tests = found.measurement, found.tests
    return (
        measurement.name,
        f"{measurement.saving:.1%}",
        f"{measurement.mean:.4f}",
        f"{measurement.sd:.4f}",
        f"{measurement.rate:.1%}",
        str(found.counted.fixed or "-"),
        *(_nonces(found, name) for name in TESTS),
        f"{tests.cleared.share:.1%}",
        verdict,
    )


def _nonces(found: ProverResult, test: str) -> str:
    """Empty for a test that was not run, "-" for one that does not convict in time."""
    needed = found.tests.tests.get(test)
    if needed is None:
        return ""
    if needed.median is None:
        return "-"
    return f"{needed.median}/{needed.at_power or '-'}"


def _measurement(measurement: ProverMeasurement) -> dict[str, Any]:
    distances = None
    if measurement.chances is None:
        # JSON has no infinity; a nonce without a vector has no distance.
        distances = [each if np.isfinite(each) else None for each in measurement.distances.tolist()]
    return {
        "name": measurement.name,
        "saving": measurement.saving,
        "exact": measurement.exact,
        "distance_mean": measurement.mean,
        "distance_sd": measurement.sd,
        "mismatch_rate": measurement.rate,
        "mismatch_interval": list(measurement.interval),
        "distances": distances,
    }
