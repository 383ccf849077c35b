"""The report of an audit: a table and sentences for readers, JSON for programs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from proofserve.lab.audit.audit import WORTHWHILE, AttackMeasurement, AttackResult, Audit
from proofserve.lab.audit.compute_share import Price

COLUMNS = (
    *("attack", "saves", "distance", "beyond", "fixed"),
    *("sequential", "on average", "p_fraud", "verdict"),
)
COLOURS = {"CAUGHT": "green", "honest": "green", "NOT CAUGHT": "red", "UNFIT": "red"}

ASSUMPTIONS = (
    "A saving is the share of multiplications that the attack leaves out of an honest nonce."
    " Weights of fewer bits count as cheaper in proportion to their bits, which is the most that"
    " hardware offers. Hardware does so only with rounded activations too, which would move the"
    " vectors further. Vectors of another nonce, key or block exist already and cost nothing.",
    "Weights are rounded to the nearest integer with one scale for each 32 values; weights in fp8"
    " with one scale for each row of a matrix. The attack computes everything else honestly.",
    "Honest vectors differ from the validator's because the prover computes in a dtype that rounds"
    " more. Two machines that both round, each in its own way, are about 1.4 times as far apart.",
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    audit: Audit
    price: Price
    setup: Mapping[str, Any]
    machine: Mapping[str, str | int]

    def table(self) -> Table:
        """One row per attack, honest nodes first; the sequential test as "nonces @ p_fraud"."""
        title = f"audit of {self.setup['model']}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        table.add_column(COLUMNS[0])
        for heading in (*COLUMNS[1:6], COLUMNS[-1]):
            table.add_column(heading, justify="right", no_wrap=True)
        for *cells, sequential, _, p_fraud, verdict in self.rows:
            setting = f"{sequential} @ {p_fraud}" if p_fraud else sequential
            table.add_row(*cells, setting, f"[{COLOURS[verdict]}]{verdict}[/]")
        return table

    @property
    def rows(self) -> list[tuple[str, ...]]:
        verdict = "UNFIT" if self.audit.convicts_honest else "honest"
        honest = (*_measured(self.audit.honest), "", "", "", "", verdict)
        return [honest, *map(_row, self.audit.results)]

    @property
    def missed(self) -> list[str]:
        """A sentence for each attack that is not caught: what would be needed."""
        sentences = []
        for found in self.audit.results:
            if not found.caught:
                low, high = found.measurement.interval
                share = f"{low:.2%} to {high:.2%} of the vectors mismatch"
                sentences.append(f"{found.measurement.name}: {share}. Needed: {found.needed}.")
        return sentences

    @property
    def rule(self) -> str:
        rule = self.audit.rule
        return (
            f"A vector is a mismatch if it is further than {rule.dist_threshold:g} from the"
            " validator's. An honest node may have mismatches in"
            f" {rule.p_mismatch:g} of its nonces. An attack is CAUGHT if the exact binomial test"
            f" over at most {rule.max_nonces} nonces convicts it with a chance of {rule.power:g} or"
            f" more, and an honest node with a chance of {rule.alpha:g} or less. The rate of"
            " mismatches is taken at the lower end of its 95 % interval. The sequential test has"
            " the same two chances: the table shows the largest p_fraud that convicts the attack,"
            " and the number of nonces after which it has convicted. The audit fails if an attack"
            f" that saves {WORTHWHILE:.0%} or more is not caught, or if honest nodes would be"
            " convicted."
        )

    @property
    def shortcuts(self) -> str:
        """The work that a prover can leave out without changing a vector."""
        price = self.price
        return (
            "An exact shortcut leaves work out and gives the same vectors, so no validator can see"
            " it. Every scheme of version 1 reads only the last position. In the last layer the MLP"
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
            "rule": asdict(audit.rule),
            "rule_in_words": self.rule,
            "honest": _measurement(audit.honest),
            "attacks": [_result(found) for found in audit.results],
            "exact_shortcuts": {
                "unread_mlp": self.price.unread_mlp,
                "unread_attention": self.price.unread_attention,
            },
            "multiplications_per_nonce": self.price.honest,
            "setup": dict(self.setup),
            "machine": dict(self.machine),
        }


def _row(found: AttackResult) -> tuple[str, ...]:
    fixed, quickest = found.conviction.fixed, found.conviction.sequential
    sequential = ("-", "", "")
    if quickest is not None:
        sequential = (str(quickest.nonces), f"{quickest.expected:.0f}", f"{quickest.p_fraud:g}")
    verdict = "CAUGHT" if found.caught else "NOT CAUGHT"
    return (*_measured(found.measurement), str(fixed or "-"), *sequential, verdict)


def _measured(measurement: AttackMeasurement) -> tuple[str, ...]:
    distance = f"{measurement.mean:.3f} ± {measurement.sd:.3f}"
    return measurement.name, f"{measurement.saving:.1%}", distance, f"{measurement.rate:.1%}"


def _result(found: AttackResult) -> dict[str, Any]:
    return {
        **_measurement(found.measurement),
        "caught": found.caught,
        "fixed_nonces": found.conviction.fixed,
        "sequential": asdict(found.conviction.sequential) if found.conviction.sequential else None,
        "default_sequential_convicts": found.conviction.default_convicts,
        "needed": found.needed,
    }


def _measurement(measurement: AttackMeasurement) -> dict[str, Any]:
    distances = measurement.distances
    return {
        "name": measurement.name,
        "saving": measurement.saving,
        "distance_mean": measurement.mean,
        "distance_sd": measurement.sd,
        "mismatch_rate": measurement.rate,
        "mismatch_interval": list(measurement.interval),
        "distances": None if distances is None else distances.tolist(),
    }
