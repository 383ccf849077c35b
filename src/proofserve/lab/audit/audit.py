"""Measures every attack on a deployment, and works out which of them its validators convict."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from proofserve.lab.audit.attacks import AuditedDeployment, AuditedProver, attacks
from proofserve.lab.audit.conviction import ConvictionRule, PowerAnalysis
from proofserve.lab.audit.evidence import figures_of
from proofserve.lab.audit.measurement import (
    Errors,
    Floats,
    ProverMeasurement,
    errors_of,
    measured,
    mixtures,
    vectors_by,
)
from proofserve.lab.audit.results import Audit, ProverResult
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Chances, Vectors, default_share
from proofserve.lab.verify.populations import (
    LEAST_LEANING,
    HonestPopulations,
    RunFigures,
    populations,
)
from proofserve.lab.verify.simulation import draws, node_figures, simulated
from proofserve.protocol.verdict.scale import fitted

# Fewer nonces bound no spread.
FEWEST = LEAST_LEANING
RUNS = 2000
# The share of verifications that may clear an attack before it is convicted, and it still counts as
# caught: some times what ``verify`` allows, since few figures are drawn again and again.
CLEARED_AT_MOST = 0.01
OWN = "our own run"


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``nonces`` are those of each prover, ``runs`` its simulated verifications.

    Without the populations ``honest`` of a calibration the audit takes the kernels that it emulates
    itself, and without ``dist_threshold`` the distance that a share ``rule.p_mismatch`` of the
    vectors of the farthest of them exceeds by a fit. ``only`` restricts the attacks to these names.
    Without ``twins`` verifications leave that test out.
    """

    rule: ConvictionRule
    nonces: int
    honest: HonestPopulations | None = None
    dist_threshold: float | None = None
    runs: int = RUNS
    only: Collection[str] | None = None
    twins: bool = True


def audit(deployment: AuditedDeployment, options: AuditOptions, progress: Progress) -> Audit:
    """Run every attack on the same nonces, and work out what convicts it.

    Raises LabError if the validator's or the deployed model's vectors are not all finite, and
    ValueError for less than ``FEWEST`` nonces.
    """
    if options.nonces < FEWEST:
        raise ValueError(f"nonces: {options.nonces} is below {FEWEST}")
    return _Auditing(deployment, options, progress).audit()


class _Auditing:
    def __init__(
        self, deployment: AuditedDeployment, options: AuditOptions, progress: Progress
    ) -> None:
        self._deployment = deployment
        self._options = options
        self._progress = progress
        self._nonces = range(options.nonces)
        self._deployed = AuditedProver(OWN, 0.0, lambda: deployment.deployed)

    def audit(self) -> Audit:
        options, deployment = self._options, self._deployment
        truth = self._all_of(AuditedProver("the validator", 0.0, lambda: deployment.truth))
        honest = {self._deployed: errors_of(self._all_of(self._deployed), truth)}
        for kernel in deployment.kernels():
            errors = errors_of(self._vectors(kernel), truth)
            # Kernels that give no numbers, such as float16 for some models, serve no client.
            if np.isfinite(errors).all():
                honest[kernel] = errors
        predictions = self._predictions()
        has_twins = deployment.has_twins and options.twins
        shown = {
            prover.name: figures_of(errors, predictions, has_twins)
            for prover, errors in honest.items()
        }
        limit = options.dist_threshold or max(
            fitted(each.lengths).quantile(1.0 - options.rule.p_mismatch) for each in shown.values()
        )
        kernels = [measured(prover, errors, limit) for prover, errors in honest.items()]
        seen = [
            measured(prover, errors_of(self._vectors(prover), truth), limit)
            for prover in attacks(deployment, kernels[0].mean)
            if options.only is None or prover.name in options.only
        ]
        own = shown.pop(OWN)
        null = options.honest or populations(own, shown, self._cheats(seen, predictions))
        judging = _Judging(options, null, own, predictions, self._progress)
        return Audit(
            rule=options.rule,
            dist_threshold=limit,
            populations=null.names,
            suspects=tuple(predictions),
            runs=options.runs,
            honest=judging.results(kernels),
            attacks=judging.results([*seen, *mixtures(kernels[0], seen)]),
        )

    def _vectors(self, prover: AuditedProver) -> Vectors:
        return vectors_by(prover.name, prover.prepare, self._nonces, self._progress)

    def _all_of(self, prover: AuditedProver) -> Vectors:
        found = self._vectors(prover)
        if len(found) < len(self._nonces):
            raise LabError(
                f"the vectors of {prover.name} are not all finite; repair the checkpoint,"
                " or choose another dtype"
            )
        return found

    def _predictions(self) -> dict[str, Errors]:
        names = self._deployment.names
        self._progress.step(f"{len(names)} suspects on {len(self._nonces)} nonces", len(names))
        found = {}
        for name in names:
            predicted = self._deployment.predictions(name, self._nonces)
            found[name] = np.array([predicted[nonce] for nonce in self._nonces])
            self._progress.advance()
        return found

    def _cheats(
        self, seen: Sequence[ProverMeasurement], predictions: Mapping[str, Errors]
    ) -> dict[str, Floats]:
        """The cosines of each prover that has a suspect's weights, with that suspect."""
        return {
            each.name: figures_of(each.errors, {each.name: predictions[each.name]}, False).cosines[
                each.name
            ]
            for each in seen
            if each.name in predictions and np.isfinite(each.errors).all()
        }


class _Judging:
    """Verifications of provers by the populations ``null``, beside our ``own`` run."""

    def __init__(
        self,
        options: AuditOptions,
        null: HonestPopulations,
        own: RunFigures,
        predictions: Mapping[str, Errors],
        progress: Progress,
    ) -> None:
        rule = options.rule
        self._rule = rule
        self._runs = options.runs
        self._analysis = PowerAnalysis(rule)
        self._chances = Chances(rule.alpha, 1.0 - rule.power, default_share(rule.max_nonces))
        self._null = null
        self._own = own
        self._predictions = predictions
        self._progress = progress

    def results(self, seen: Sequence[ProverMeasurement]) -> tuple[ProverResult, ...]:
        self._progress.step("simulating verifications", len(seen))
        return tuple(self._result(each) for each in seen)

    def _result(self, each: ProverMeasurement) -> ProverResult:
        figures = figures_of(each.errors, self._predictions, self._own.alike is not None)
        node = node_figures(figures, self._own, self._null)
        drawn = draws(len(node), self._runs, self._rule.max_nonces, each.chances)
        endings = simulated(node, self._null, self._chances, drawn)
        self._progress.advance()
        would_convict = endings.nonces_to(endings.convicted_at, self._rule.power) is not None
        is_cleared = endings.cleared > CLEARED_AT_MOST * self._runs
        ended = endings.convicted + endings.unexplained
        return ProverResult(
            measurement=each,
            # Judged by the lower end of the interval: the true rate is rarely below it.
            counted=self._analysis.conviction(each.interval[0]),
            endings=endings,
            caught=would_convict and not is_cleared,
            noticed=ended >= (1.0 - CLEARED_AT_MOST) * self._runs,
            cosines=None
            if each.chances is not None
            else np.stack([*figures.cosines.values()], axis=1),
        )
