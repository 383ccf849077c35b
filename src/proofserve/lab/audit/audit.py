"""Measures every attack on a deployment, and works out which of them its validators convict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.attacks import AuditedDeployment, AuditedProver, attacks
from proofserve.lab.audit.bootstrap import RUNS, Bootstrap
from proofserve.lab.audit.conviction import ConvictionRule, PowerAnalysis
from proofserve.lab.audit.evidence import HonestFigures, NonceEvidence, cosines
from proofserve.lab.audit.measurement import (
    Errors,
    ProverMeasurement,
    errors_of,
    measured,
    mixtures,
    vectors_by,
)
from proofserve.lab.audit.results import Audit, ProverResult
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.direction import Expected
from proofserve.lab.verify.judges import Vectors
from proofserve.protocol.verdict.direction import honest_spread
from proofserve.protocol.verdict.scale import ScaleFit, fitted, ratios_tell_more

# A spread needs two nonces.
FEWEST = 2
HONEST = "honest"
# The normal quantile of 0.99, as in ``calibrate noise``.
Z = 2.33


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``nonces`` are those of each prover, ``runs`` its simulated verifications.

    Without ``figures`` of a calibration the audit takes those of its own honest prover, and without
    ``dist_threshold`` the distance that a share ``rule.p_mismatch`` of honest vectors exceeds by
    the fit.
    """

    rule: ConvictionRule
    nonces: int
    figures: HonestFigures | None = None
    dist_threshold: float | None = None
    runs: int = RUNS


def audit(deployment: AuditedDeployment, options: AuditOptions, progress: Progress) -> Audit:
    """Run every attack on the same nonces, and work out what convicts it.

    Raises LabError if the validator's or the deployed model's vectors are not all finite,
    ValueError for less than two nonces, and ProtocolError if honest vectors equal the validator's.
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
        self._deployed = AuditedProver(HONEST, 0.0, lambda: deployment.deployed)

    def audit(self) -> Audit:
        truth = self._all_of(AuditedProver("the validator", 0.0, lambda: self._deployment.truth))
        served = self._all_of(self._deployed)
        deployed = errors_of(served, truth)
        distances = np.linalg.norm(deployed, axis=1).astype(np.float64)
        options, figures = self._options, self._options.figures
        fit = figures.fit if figures else fitted(distances)
        limit = options.dist_threshold or fit.quantile(1.0 - options.rule.p_mismatch)

        def found(prover: AuditedProver) -> ProverMeasurement:
            return measured(prover, errors_of(self._vectors(prover), truth), limit)

        honest = [measured(self._deployed, deployed, limit)]
        provers = list(self._deployment.honest_settings())
        settings = [found(each) for each in provers]
        # A setting that gives no numbers, such as float16 for some models, serves no client.
        honest += [each for each in settings if np.isfinite(each.errors).all()]
        seen = [found(each) for each in attacks(self._deployment, honest[0].mean)]
        predictions = self._predictions()
        own = _exact_errors(served, truth)
        if figures is None:
            expected = own_cosines(seen, predictions)
            spreads = {n: honest_spread(c) for n, c in cosines_by_name(deployed, predictions)}
            others = [m for p, m in zip(provers, settings, strict=True) if p.other_kernels]
            pairs = tuple(distances.tolist())
            figures = HonestFigures(fit, _paired_fit(others, own), pairs, expected, spreads)
        evidence = NonceEvidence(figures, predictions, own, self._deployment.has_twins)
        judging = _Judging(options, evidence, self._progress)
        return Audit(
            rule=options.rule,
            dist_threshold=limit,
            suspects=tuple(predictions),
            pairs=len(figures.pairs),
            runs=options.runs,
            honest=judging.results(honest),
            attacks=(*judging.results(seen), *judging.mixed(honest[0], seen)),
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


class _Judging:
    def __init__(self, options: AuditOptions, evidence: NonceEvidence, progress: Progress) -> None:
        self._analysis = PowerAnalysis(options.rule)
        self._bootstrap = Bootstrap(options.rule, options.runs)
        self._evidence = evidence
        self._progress = progress

    def results(self, seen: Sequence[ProverMeasurement]) -> tuple[ProverResult, ...]:
        self._progress.step("working out what convicts", len(seen))
        return tuple(self._result(each) for each in seen)

    def _result(self, each: ProverMeasurement) -> ProverResult:
        made = self._evidence.increments(each.errors)
        self._progress.advance()
        return ProverResult(
            measurement=each,
            # Judged by the lower end of the interval: the true rate is rarely below it.
            counted=self._analysis.conviction(each.interval[0]),
            tests=self._bootstrap.result(made, None, self._evidence.honest.pairs),
            cosines=cosines(each.errors, self._evidence.predictions),
        )

    def mixed(
        self, honest: ProverMeasurement, seen: Sequence[ProverMeasurement]
    ) -> tuple[ProverResult, ...]:
        found = []
        for mixture, forged in mixtures(honest, seen):
            parts = [self._evidence.increments(each.errors) for each in (honest, forged)]
            made = parts[0].followed_by(parts[1])
            pairs = self._evidence.honest.pairs
            tests = self._bootstrap.result(made, mixture.chances, pairs)
            counted = self._analysis.conviction(mixture.interval[0])
            found.append(ProverResult(mixture, counted, tests))
        return tuple(found)


def own_cosines(
    seen: Sequence[ProverMeasurement], predictions: Mapping[str, Errors]
) -> dict[str, Expected]:
    """The cosines of each prover that has a suspect's weights, against that suspect."""
    found = {}
    for each in seen:
        if each.name in predictions and np.isfinite(each.errors).all():
            own = cosines(each.errors, {each.name: predictions[each.name]})
            sd = float(own.std(ddof=1))
            # A lower bound: what is expected too high would clear a fraud too soon.
            found[each.name] = Expected(float(own.mean()) - Z * sd / math.sqrt(len(own)), sd)
    return found


def cosines_by_name(
    errors: Errors, predictions: Mapping[str, Errors]
) -> list[tuple[str, NDArray[np.float64]]]:
    return list(zip(predictions, cosines(errors, predictions).T, strict=True))


def _paired_fit(honest: Sequence[ProverMeasurement], own: Errors) -> ScaleFit | None:
    """The fit of ratios to the validator's ``own`` errors [nonces, width], if they tell more.

    Not of the deployed prover: it has the validator's kernels in an audit, so its ratios are 1.
    """
    lengths = np.linalg.norm(own, axis=1)
    if not honest:
        return None
    distances = np.concatenate([each.distances for each in honest])
    ratios = distances / np.tile(lengths, len(honest))
    return fitted(ratios) if ratios_tell_more(distances, ratios) else None


def _exact_errors(made: Vectors, truth: Vectors) -> Errors:
    """Without the rounding of the wire: a validator computes both itself."""
    return np.array([made[nonce] - vector for nonce, vector in truth.items()])
