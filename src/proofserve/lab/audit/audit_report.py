"""An audit for people (a table, sentences) and for programs (JSON)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from proofserve.lab.audit.audit import WORTHWHILE, AttackFinding, Audit, Evidence
from proofserve.lab.audit.compute_share import Price
from proofserve.lab.audit.conviction import ConvictionRule

COLUMNS = (
    *("attack", "saves", "distance", "beyond", "fixed"),
    *("sequential", "on average", "p_fraud", "verdict"),
)
COLOURS = {"CAUGHT": "green", "honest": "green", "NOT CAUGHT": "red", "UNFIT": "red"}
PASSED_COLOURS = {True: "green", False: "red"}

ASSUMPTIONS = (
    "Savings are shares of the multiplications that an honest nonce costs. Rounded weights count as"
    " if a multiplication got cheaper in proportion to their bits, the most that hardware offers;"
    " that would take rounded activations as well, which would be further off. Vectors of another"
    " nonce, key or block exist already and cost nothing.",
    "Weights are rounded to the nearest with a scale for each 32 values, those in fp8 with a scale"
    " for each row of a matrix. Everything else is computed as the honest prover does it.",
    "Honest vectors differ from the validator's because the prover rounds more. Where both"
    " round alike on different machines, expect distances about 1.4 times as large.",
)


@dataclass(frozen=True, slots=True)
class AuditReport:
    """An audit, what was audited (``setup``) and where (``machine``)."""

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
        """The cells of ``COLUMNS``, honest nodes first."""
        verdict = "UNFIT" if self.audit.convicts_honest else "honest"
        honest = (*_measured(self.audit.honest), "", "", "", "", verdict)
        return [honest, *map(_row, self.audit.findings)]

    @property
    def missed(self) -> list[str]:
        """A sentence for each attack that is not caught: what would be needed."""
        return [
            f"{found.evidence.name}: {_between(found.evidence)} of the vectors mismatch."
            f" Needed: {found.needed}."
            for found in self.audit.findings
            if not found.caught
        ]

    @property
    def rule(self) -> str:
        """The rule in words."""
        return rule_in_words(self.audit.rule)

    @property
    def shortcuts(self) -> str:
        """What can be left out without anybody being able to tell."""
        price = self.price
        return (
            "Exact shortcuts give the same vectors, so that no validator can see them. Every scheme"
            " of version 1 reads the last position alone: the last layer's MLP at the other"
            f" positions is {price.unread_mlp:.1%} of a whole forward. proofserve's own servers"
            " leave it out, and savings are counted from that price. The last layer's queries,"
            f" scores and output projections at those positions are a further"
            f" {price.unread_attention:.1%}, which a prover may save and still be honest."
        )

    def json(self) -> dict[str, Any]:
        """Everything, under names; distances by nonce where there are any."""
        audit = self.audit
        return {
            "passed": audit.passed,
            "verdict": audit.verdict,
            "rule": asdict(audit.rule),
            "rule_in_words": self.rule,
            "honest": _evidence(audit.honest),
            "attacks": [_finding(found) for found in audit.findings],
            "exact_shortcuts": {
                "unread_mlp": self.price.unread_mlp,
                "unread_attention": self.price.unread_attention,
            },
            "multiplications_per_nonce": self.price.honest,
            "setup": dict(self.setup),
            "machine": dict(self.machine),
        }


def rule_in_words(rule: ConvictionRule) -> str:
    """When an attack counts as caught, for those who read the report."""
    return (
        f"A vector further than {rule.dist_threshold:g} from the validator's is a mismatch, which"
        f" an honest node may have {rule.p_mismatch:g} of the time. CAUGHT means that the exact"
        f" binomial test over at most {rule.max_nonces} nonces convicts with a chance of"
        f" {rule.power:g} or more, while it convicts an honest node with {rule.alpha:g} or less."
        " The rate of mismatches is taken at the lower end of its 95 % interval. The sequential"
        " test has the same two chances; shown is the largest p_fraud that convicts, and after how"
        " many nonces it has with that chance. The audit fails on an attack that saves"
        f" {WORTHWHILE:.0%} or more and is not caught, and where honest nodes would be convicted."
    )


def _row(found: AttackFinding) -> tuple[str, ...]:
    fixed, quickest = found.conviction.fixed, found.conviction.sequential
    sequential = ("-", "", "")
    if quickest is not None:
        sequential = (str(quickest.nonces), f"{quickest.expected:.0f}", f"{quickest.p_fraud:g}")
    verdict = "CAUGHT" if found.caught else "NOT CAUGHT"
    return (*_measured(found.evidence), str(fixed or "-"), *sequential, verdict)


def _measured(evidence: Evidence) -> tuple[str, ...]:
    distance = f"{evidence.mean:.3f} ± {evidence.sd:.3f}"
    return evidence.name, f"{evidence.saving:.1%}", distance, f"{evidence.rate:.1%}"


def _between(evidence: Evidence) -> str:
    low, high = evidence.interval
    return f"{low:.2%} to {high:.2%}"


def _finding(found: AttackFinding) -> dict[str, Any]:
    return {
        **_evidence(found.evidence),
        "caught": found.caught,
        "fixed_nonces": found.conviction.fixed,
        "sequential": asdict(found.conviction.sequential) if found.conviction.sequential else None,
        "default_sequential_convicts": found.conviction.default_convicts,
        "needed": found.needed,
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    distances = evidence.distances
    return {
        "name": evidence.name,
        "saving": evidence.saving,
        "distance_mean": evidence.mean,
        "distance_sd": evidence.sd,
        "mismatch_rate": evidence.rate,
        "mismatch_interval": list(evidence.interval),
        "distances": None if distances is None else distances.tolist(),
    }
