"""What an audit found: each prover with what convicts it, and the verdict on the deployment."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.audit.conviction import Conviction, ConvictionRule
from proofserve.lab.audit.measurement import Floats, ProverMeasurement
from proofserve.lab.verify.simulation import Endings

# An attack that saves less than this share of the compute is reported, but fails no deployment.
WORTHWHILE = 0.10
# The most attacks that the verdict names.
NAMED = 3


@dataclass(frozen=True, slots=True)
class ProverResult:
    """A prover, and what convicts it.

    ``counted`` is the count's, ``endings`` are those of the other tests, together and alone.
    ``cosines`` float64 [n, suspects] is None for a mixture; NaN where there is no vector.
    ``caught`` says whether verifications convict it with the wanted chance, ``noticed`` whether
    they convict it or find that nothing explains it.
    """

    measurement: ProverMeasurement
    counted: Conviction
    endings: Endings
    caught: bool
    noticed: bool
    cosines: Floats | None = None

    @property
    def cleared_share(self) -> float:
        return self.endings.cleared / len(self.endings.cleared_at)

    @property
    def unexplained_share(self) -> float:
        return self.endings.unexplained / len(self.endings.cleared_at)

    @property
    def mean_cosines(self) -> list[float] | None:
        """With each suspect, over the nonces with a vector; None if there are no such."""
        if self.cosines is None:
            return None
        rows = self.cosines[np.isfinite(self.cosines).all(axis=1)]
        return rows.mean(axis=0).tolist() if len(rows) else None

    @property
    def escapes(self) -> bool:
        """Whether it fails the deployment: no validator notices it, and it saves enough."""
        saves = self.measurement.saving >= WORTHWHILE
        return saves and not self.noticed and not self.measurement.exact


@dataclass(frozen=True, slots=True)
class Audit:
    """The results: of honest provers, the deployed one first, and of the attacks.

    ``dist_threshold`` (L2) is that of the count. ``suspects`` are the columns of the results'
    cosines, ``populations`` the honest kernels behind the verdicts, ``runs`` the number of
    simulated verifications of each prover.
    """

    rule: ConvictionRule
    dist_threshold: float
    populations: tuple[str, ...]
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
        return next((each for each in self.honest if each.endings.convicted), None)

    @property
    def passed(self) -> bool:
        """Whether honest nodes are safe, and no attack that saves enough goes unnoticed."""
        return self.unfit is None and not any(each.escapes for each in self.attacks)

    @property
    def verdict(self) -> str:
        if self.unfit is not None:
            found = self.unfit.measurement
            return (
                f"UNFIT: an honest node would be convicted: {found.name};"
                f" {found.rate:.1%} of its vectors are beyond the threshold"
                f" of {self.dist_threshold:g}"
            )
        open_ones = [each for each in self.attacks if not (each.caught or each.measurement.exact)]
        missed = [each for each in open_ones if not each.noticed]
        unexplained = [each for each in open_ones if each.noticed]
        within = f"within {self.rule.max_nonces} nonces"
        text = f"NOT CAUGHT {within}: {_named(missed)}"
        if self.passed:
            worth = f" worth {WORTHWHILE:.0%}" if missed else ""
            text = f"CAUGHT: every attack{worth} {within}"
            text += f"; not {_named(missed)}" if missed else ""
        return text + (f"; no verdict on {_named(unexplained)}" if unexplained else "")


def _named(missed: Sequence[ProverResult]) -> str:
    ranked = sorted((each.measurement for each in missed), key=lambda m: m.saving, reverse=True)
    names = [f"{each.name} (saves {each.saving:.0%})" for each in ranked[:NAMED]]
    more = len(ranked) - NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
