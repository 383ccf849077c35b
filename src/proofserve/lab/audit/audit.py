"""Measures every attack on a deployment, and works out which of them its validators convict."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.attacks import Attack, AuditedDeployment, attacks
from proofserve.lab.audit.conviction import Conviction, ConvictionRule, PowerAnalysis
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Recompute, Vectors
from proofserve.protocol.codec import to_float16
from proofserve.protocol.verdict.counting import rate_interval
from proofserve.rounds.calls import chunks

# Shares of the nonces that a cautious prover forges; it computes the others honestly.
FORGED_SHARES = (0.10, 0.05, 0.02)
# An attack that saves less than this share of the compute is reported, but fails no deployment.
WORTHWHILE = 0.10
# A forgery for the remaining nonces has to save at least this share.
FORGERY_SAVES = 0.90
# The largest distance of two vectors of length 1; a missing vector counts as this far.
FARTHEST = 2.0
# The most attacks that the verdict names.
NAMED = 3
# Nonces of one step of progress.
AT_ONCE = 16

Distances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AttackMeasurement:
    """How far the vectors of an attack are from the validator's, and how many mismatch.

    ``rate`` is the share of mismatches, and ``interval`` its 95 % interval. ``distances`` are
    float64 [nonces]; None for a mixture, which is calculated from two other measurements.
    """

    name: str
    saving: float
    mean: float
    sd: float
    rate: float
    interval: tuple[float, float]
    distances: Distances | None = None


@dataclass(frozen=True, slots=True)
class AttackResult:
    """An attack, what convicts it, and what would be needed if nothing does."""

    measurement: AttackMeasurement
    conviction: Conviction
    needed: str

    @property
    def caught(self) -> bool:
        """Whether ``max_nonces`` convict by the fixed test, at the lower end of ``interval``."""
        return self.conviction.fixed is not None

    @property
    def escapes(self) -> bool:
        """Whether it fails the deployment: it is not caught and saves enough."""
        return not self.caught and self.measurement.saving >= WORTHWHILE


@dataclass(frozen=True, slots=True)
class Audit:
    """The results. ``honest`` compares the deployed model with the validator's vectors."""

    rule: ConvictionRule
    honest: AttackMeasurement
    results: tuple[AttackResult, ...]

    @property
    def convicts_honest(self) -> bool:
        """Whether the 95 % interval of honest mismatches is above what the rule allows."""
        return self.honest.interval[0] > self.rule.p_mismatch

    @property
    def passed(self) -> bool:
        """Whether honest nodes are safe, and every attack that saves enough is caught."""
        return not self.convicts_honest and not any(each.escapes for each in self.results)

    @property
    def verdict(self) -> str:
        if self.convicts_honest:
            return (
                f"UNFIT: {self.honest.rate:.1%} of honest vectors are beyond the threshold of"
                f" {self.rule.dist_threshold:g}, so that honest nodes would be convicted"
            )
        missed = [each.measurement for each in self.results if not each.caught]
        within = f"within {self.rule.max_nonces} nonces"
        if not missed:
            return f"CAUGHT: every attack {within}"
        if self.passed:
            return f"CAUGHT: every attack worth {WORTHWHILE:.0%} {within}; not {_named(missed)}"
        return f"NOT CAUGHT {within}: {_named(missed)}"


def audit(
    deployment: AuditedDeployment, rule: ConvictionRule, nonces: int, progress: Progress
) -> Audit:
    """Run every attack on ``nonces`` nonces each, and work out what convicts it.

    Raises LabError if the validator's vectors are not all finite, and ValueError for less than one
    nonce.
    """
    if nonces < 1:
        raise ValueError(f"nonces: {nonces} is below 1")
    truth = _vectors("recomputing as a validator", deployment.validator, range(nonces), progress)
    if len(truth) < nonces:
        raise LabError("the validator's vectors are not all finite; repair the checkpoint")

    def measurement(attack: Attack) -> AttackMeasurement:
        made = _vectors(attack.name, attack.prepare, range(nonces), progress)
        apart = np.array([_distance(truth[nonce], made.get(nonce)) for nonce in range(nonces)])
        return measured(attack.name, attack.saving, apart, rule.dist_threshold)

    honest = measurement(Attack("honest", 0.0, deployment.honest))
    seen = [measurement(attack) for attack in attacks(deployment)]
    seen += mixtures(honest, seen)
    progress.step("working out what convicts", len(seen))
    analysis = PowerAnalysis(rule)
    results = []
    for each in seen:
        results.append(attack_result(each, honest, analysis))
        progress.advance()
    return Audit(rule, honest, tuple(results))


def measured(
    name: str, saving: float, distances: Distances, dist_threshold: float
) -> AttackMeasurement:
    # The comparison of a validator (protocol B.4) is in float32.
    beyond = int((distances.astype(np.float32) > np.float32(dist_threshold)).sum())
    return AttackMeasurement(
        name=name,
        saving=saving,
        mean=float(distances.mean()),
        sd=float(distances.std()),
        rate=beyond / len(distances),
        interval=rate_interval(beyond, len(distances)),
        distances=distances,
    )


def mixtures(
    honest: AttackMeasurement, forged: Sequence[AttackMeasurement]
) -> list[AttackMeasurement]:
    """Provers that compute most nonces, and forge the rest by the attack that mismatches least.

    A validator draws its sample at random, so that each nonce in it is forged with the same chance.
    Empty if no attack saves ``FORGERY_SAVES``.
    """
    cheap = [each for each in forged if each.saving >= FORGERY_SAVES]
    if not cheap:
        return []
    best = min(cheap, key=lambda each: (each.interval[0], each.mean))
    return [_mixture(honest, best, share) for share in FORGED_SHARES]


def attack_result(
    measurement: AttackMeasurement, honest: AttackMeasurement, analysis: PowerAnalysis
) -> AttackResult:
    """Judged by the lower end of the interval: the true rate is rarely below it."""
    conviction = analysis.conviction(measurement.interval[0])
    needed = "" if conviction.fixed is not None else _needed(measurement, honest, analysis)
    return AttackResult(measurement, conviction, needed)


def _named(missed: Sequence[AttackMeasurement]) -> str:
    ranked = sorted(missed, key=lambda each: each.saving, reverse=True)
    names = [f"{each.name} (saves {each.saving:.0%})" for each in ranked[:NAMED]]
    more = len(ranked) - NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _mixture(
    honest: AttackMeasurement, forged: AttackMeasurement, share: float
) -> AttackMeasurement:
    def mixed(of_honest: float, of_forged: float) -> float:
        return (1.0 - share) * of_honest + share * of_forged

    mean = mixed(honest.mean, forged.mean)
    highest = mixed(honest.interval[1], forged.interval[1])
    square = mixed(honest.mean**2 + honest.sd**2, forged.mean**2 + forged.sd**2)
    return AttackMeasurement(
        name=f"honest on {1.0 - share:.0%}, else {forged.name}",
        saving=share * forged.saving,
        mean=mean,
        sd=math.sqrt(max(0.0, square - mean**2)),
        rate=mixed(honest.rate, forged.rate),
        interval=(mixed(honest.interval[0], forged.interval[0]), highest),
    )


def _needed(
    measurement: AttackMeasurement, honest: AttackMeasurement, analysis: PowerAnalysis
) -> str:
    """What would catch it: more nonces, or a lower threshold that honest vectors do not exceed."""
    rate = measurement.interval[0]
    ways = []
    if rate > analysis.rule.p_mismatch and (more := analysis.nonces_beyond(rate)) is not None:
        ways.append(f"{more} nonces")
    if measurement.distances is not None and honest.distances is not None:
        ways.append(_lower_threshold(measurement.distances, honest.distances, analysis))
    return ", or ".join(ways) or "a rule that catches the forged nonces alone"


def _lower_threshold(made: Distances, honest: Distances, analysis: PowerAnalysis) -> str:
    needed = analysis.mismatches_needed(len(made))
    if needed is None:
        return "a measurement of more nonces"
    bound = float(np.sort(made)[-needed])
    beyond = int((honest >= bound).sum())
    if rate_interval(beyond, len(honest))[0] > analysis.rule.p_mismatch:
        return f"a threshold below {bound:.2g}, which convicts honest nodes as well"
    return f"a threshold below {bound:.2g} (honest: up to {honest.max():.2g})"


def _vectors(
    title: str, prepare: Callable[[], Recompute], nonces: Sequence[int], progress: Progress
) -> Vectors:
    progress.step(f"{title}: {len(nonces)} nonces", len(nonces))
    answer = prepare()
    found: dict[int, NDArray[np.float32]] = {}
    for chunk in chunks(nonces, AT_ONCE):
        found |= answer(chunk)
        for _ in chunk:
            progress.advance()
    return found


def _distance(ours: NDArray[np.float32], theirs: NDArray[np.float32] | None) -> float:
    """As a validator computes it, both rounded to float16 as on the wire (protocol B.4)."""
    if theirs is None:
        return FARTHEST
    ours, theirs = (to_float16(vector).astype(np.float32) for vector in (ours, theirs))
    return float(np.linalg.norm(ours - theirs))
