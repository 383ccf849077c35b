"""What an audit found: each prover with what convicts it, and the verdict on the deployment."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.audit.bootstrap import BootstrapResult, NoncesNeeded
from proofserve.lab.audit.conviction import Conviction, ConvictionRule
from proofserve.lab.audit.measurement import Floats, ProverMeasurement

# An attack that saves less than this share of the compute is reported, but fails no deployment.
WORTHWHILE = 0.10
# The most attacks that the verdict names.
NAMED = 3


@dataclass(frozen=True, slots=True)
class ProverResult:
    """A prover, and what convicts it.

    ``counted`` is the count's, ``tests`` that of the others. ``cosines`` float64 [n, suspects] is
    None for a mixture; NaN where there is no vector.
    """

    measurement: ProverMeasurement
    counted: Conviction
    tests: BootstrapResult
    cosines: Floats | None = None

    @property
    def caught(self) -> bool:
        """Whether a default test convicts with the wanted chance within the most nonces."""
        return any(each.at_power is not None for each in self._by_default)

    @property
    def convicted(self) -> bool:
        """Whether a default test convicts at all, in any of the verifications."""
        return any(each.share > 0.0 for each in self._by_default)

    @property
    def mean_cosines(self) -> list[float] | None:
        """With each suspect, over the nonces with a vector; None if there are no such."""
        if self.cosines is None:
            return None
        rows = self.cosines[np.isfinite(self.cosines).all(axis=1)]
        return rows.mean(axis=0).tolist() if len(rows) else None

    @property
    def _by_default(self) -> list[NoncesNeeded]:
        return [self.tests.tests[name] for name in self.tests.default]

    @property
    def escapes(self) -> bool:
        """Whether it fails the deployment: it is not caught and saves enough."""
        saves = self.measurement.saving >= WORTHWHILE
        return saves and not self.caught and not self.measurement.exact


@dataclass(frozen=True, slots=True)
class Audit:
    """The results: of honest provers, the deployed one first, and of the attacks.

    ``dist_threshold`` (L2) is that of the count. ``suspects`` are the columns of the results'
    cosines, ``pairs`` the number of honest distances behind the tests, ``runs`` that of simulated
    verifications of each prover.
    """

    rule: ConvictionRule
    dist_threshold: float
    pairs: int
    runs: int
    suspects: tuple[str, ...]
    honest: tuple[ProverResult, ...]
    attacks: tuple[ProverResult, ...]

    @property
    def unfit(self) -> ProverResult | None:
        """An honest prover that would be convicted, None if there is none."""
        deployed = self.honest[0]
        if deployed.measurement.interval[0] > self.rule.p_mismatch:
            return deployed
        return next((each for each in self.honest if each.convicted), None)

    @property
    def passed(self) -> bool:
        """Whether honest nodes are safe, and every attack that saves enough is caught."""
        return self.unfit is None and not any(each.escapes for each in self.attacks)

    @property
    def verdict(self) -> str:
        if self.unfit is not None:
            found = self.unfit.measurement
            return (
                f"UNFIT: a node would be convicted that is {found.name};"
                f" {found.rate:.1%} of its vectors are beyond the threshold"
                f" of {self.dist_threshold:g}"
            )
        missed = [each for each in self.attacks if not (each.caught or each.measurement.exact)]
        within = f"within {self.rule.max_nonces} nonces"
        if not missed:
            return f"CAUGHT: every attack {within}"
        if self.passed:
            return f"CAUGHT: every attack worth {WORTHWHILE:.0%} {within}; not {_named(missed)}"
        return f"NOT CAUGHT {within}: {_named(missed)}"


def _named(missed: Sequence[ProverResult]) -> str:
    ranked = sorted((each.measurement for each in missed), key=lambda m: m.saving, reverse=True)
    names = [f"{each.name} (saves {each.saving:.0%})" for each in ranked[:NAMED]]
    more = len(ranked) - NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
