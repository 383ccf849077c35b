"""Measures every attack on a deployment, and works out which of them its validators convict."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from scipy import special

from proofserve.protocol.verdict.counting import (
    SequentialTest,
    check_inside,
    convicting_count,
    sample_size,
)
from proofserve.protocol.verdict.scale import fitted
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.audit.attacks import (
    SAMPLES,
    Beside,
    ClearedLie,
    Errors,
    Floats,
    Lie,
    ProverMeasurement,
    attacks,
    dearest,
    errors_of,
    lies,
    measured,
    mixed,
    mixtures,
    vectors_by,
)
from proofserve.verifier.audit.deployment import AuditedProver, CheckpointDeployment
from proofserve.verifier.judges import ALPHA, Chances, Vectors, few
from proofserve.verifier.populations import (
    LEAST_FIGURES,
    HonestPopulations,
    HonestRuns,
    RunFigures,
    populations,
)
from proofserve.verifier.simulation import Endings, draws, simulated

# The settings of ``p_fraud`` that are tried, from the test with the fewest nonces to the one with
# the most. The first is the default of ``proofserve verify``.
P_FRAUDS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
# An attack that saves less than this share of the compute is reported, but fails no deployment.
WORTHWHILE = 0.10
# Fewer nonces bound no spread.
FEWEST = LEAST_FIGURES
RUNS = 2000
# The share of verifications that may clear an attack before it is convicted, and it still counts as
# caught: some times what ``verify`` allows, since few figures are drawn again and again.
CLEARED_AT_MOST = 0.01
DEPLOYED = "as deployed"


@dataclass(frozen=True, slots=True)
class ConvictionRule:
    """When a node is convicted.

    At most a share ``p_mismatch`` of an honest node's vectors are mismatches. ``alpha`` is the
    chance that an honest node is convicted, ``power`` the least chance with which ``max_nonces``
    have to convict a fraud. Raises ProtocolError for a rate or chance that is not between 0 and 1.
    """

    p_mismatch: float = 0.001
    alpha: float = ALPHA
    power: float = 0.999
    max_nonces: int = 1000

    def __post_init__(self) -> None:
        for field in ("p_mismatch", "alpha", "power"):
            check_inside(field, getattr(self, field))


@dataclass(frozen=True, slots=True)
class Sequential:
    """A sequential test that convicts: its setting, and how many nonces it needs.

    After ``nonces`` it has convicted with the wanted chance; on average it needs ``expected``.
    """

    p_fraud: float
    nonces: int
    expected: float


@dataclass(frozen=True, slots=True)
class Conviction:
    """The tests that convict a node with one rate of mismatches.

    ``fixed_nonces`` is the number of nonces of the fixed test, ``sequential`` the setting of the
    sequential test with the fewest nonces; each is None if ``max_nonces`` are not enough.
    ``default_sequential_convicts`` is the chance that the sequential test convicts at its default
    setting.
    """

    fixed_nonces: int | None
    sequential: Sequential | None
    default_sequential_convicts: float


@cache
def conviction(rule: ConvictionRule, rate: float) -> Conviction:
    """What convicts a node with this ``rate`` of mismatches."""
    default, sequential = 0.0, None
    for p_fraud in P_FRAUDS:
        if p_fraud <= rule.p_mismatch:
            break
        test = SequentialTest(rule.p_mismatch, p_fraud, rule.alpha, 1.0 - rule.power)
        course = test.course(rate, rule.max_nonces)
        if p_fraud == P_FRAUDS[0]:
            default = course.convicted
        nonces = course.nonces_to_convict(rule.power)
        if nonces is not None:
            sequential = Sequential(p_fraud, nonces, course.expected_nonces)
            break
        if rate <= rule.p_mismatch:
            # An honest node's rate: no setting may convict it.
            break
    least, fixed = least_rate(rule), None
    if least is not None and rate >= least:
        fixed = sample_size(rule.p_mismatch, rule.alpha, rate, rule.power, rule.max_nonces)
    return Conviction(fixed, sequential, default)


@cache
def least_rate(rule: ConvictionRule) -> float | None:
    """The least rate of mismatches that the fixed test convicts; None if it convicts none."""
    most = rule.max_nonces

    def needed(n: int) -> int | None:
        return convicting_count(n, rule.p_mismatch, rule.alpha)

    # Power falls where one more mismatch becomes necessary, and rises between. So it is greatest
    # at ``max_nonces``, or just before it falls for the last time.
    before = next((n for n in range(most, 0, -1) if needed(n) != needed(most)), most)
    counts = {n: needed(n) for n in (most, before)}
    # The rate of which so many mismatches, or more, are as likely as the power.
    rates = (special.betaincinv(c, n - c + 1, rule.power) for n, c in counts.items() if c)
    return min(map(float, rates), default=None)


@dataclass(frozen=True, slots=True)
class ProverResult:
    """A prover, and what convicts it: the count (``counted``), or the other tests (``endings``).

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

    ``suspects`` are the columns of the results' cosines, ``populations`` the honest kernels behind
    the verdicts, ``runs`` the number of simulated verifications of each prover. ``prices`` are of
    cleared lies, for each size of a sample, if the options ask for them.
    """

    rule: ConvictionRule
    dist_threshold: float
    populations: tuple[str, ...]
    runs: int
    suspects: tuple[str, ...]
    honest: tuple[ProverResult, ...]
    attacks: tuple[ProverResult, ...]
    prices: tuple[ClearedLie, ...] = ()

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
    return few([f"{each.name} (saves {each.saving:.0%})" for each in ranked])


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """``nonces`` are those of each prover, ``runs`` its simulated verifications.

    ``honest`` says what honest means beside our run of a reference. Without it the audit takes the
    kernels that it emulates, and without
    ``dist_threshold`` the distance that a share ``rule.p_mismatch`` of the vectors of the farthest
    of them exceeds by a fit. ``only`` restricts the attacks to these names.
    """

    rule: ConvictionRule
    nonces: int
    honest: Callable[[str], HonestPopulations] | None = None
    dist_threshold: float | None = None
    runs: int = RUNS
    only: Collection[str] | None = None
    price: bool = False


def audit(deployment: CheckpointDeployment, options: AuditOptions, progress: Progress) -> Audit:
    """Run every attack on the same nonces, and work out what convicts it.

    Raises ReportedError if the validator's or the deployed model's vectors are not all finite, and
    ValueError for less than ``FEWEST`` nonces.
    """
    if options.nonces < FEWEST:
        raise ValueError(f"nonces: {options.nonces} is below {FEWEST}")
    nonces = range(options.nonces)
    deployed = AuditedProver(DEPLOYED, 0.0, lambda: deployment.deployed)
    validator = AuditedProver("the validator", 0.0, lambda: deployment.truth)
    truth = _all_of(validator, nonces, progress)

    def errors_by(prover: AuditedProver) -> Errors:
        return errors_of(vectors_by(prover, nonces, progress), truth)

    honest = {deployed: errors_of(_all_of(deployed, nonces, progress), truth)}
    # Kernels that give no numbers, such as float16 for some models, serve no client.
    computed = ((kernel, errors_by(kernel)) for kernel in deployment.kernels())
    honest |= {kernel: errors for kernel, errors in computed if np.isfinite(errors).all()}
    (own,) = (errors for prover, errors in honest.items() if prover.name == deployment.reference)
    again, predictions = errors_by(deployment.own_again), _predictions(deployment, nonces, progress)
    beside = Beside(deployment.reference, own, again, predictions)
    shown = {prover.name: beside.figures(errors) for prover, errors in honest.items()}
    limit = options.dist_threshold or max(
        fitted(each.lengths).quantile(1.0 - options.rule.p_mismatch) for each in shown.values()
    )
    null = _null(deployment, options, shown, beside)
    kernels = [measured(prover, errors, limit) for prover, errors in honest.items()]
    seen = [
        measured(prover, errors_by(prover), limit)
        for prover in attacks(deployment, kernels[0].mean)
        if options.only is None or prover.name in options.only
    ]
    judged = partial(_results, options=options, null=null, beside=beside, progress=progress)
    return Audit(
        rule=options.rule,
        dist_threshold=limit,
        populations=null.names,
        suspects=tuple(beside.predictions),
        runs=options.runs,
        honest=judged(kernels),
        attacks=judged([*seen, *mixtures(kernels[0], seen)]),
        prices=_prices(deployment, options, null, beside, (truth, kernels[0]), progress),
    )


def _prices(
    deployment: CheckpointDeployment,
    options: AuditOptions,
    null: HonestPopulations,
    beside: Beside,
    honest: tuple[Vectors, ProverMeasurement],
    progress: Progress,
) -> tuple[ClearedLie, ...]:
    if not options.price:
        return ()
    truth, deployed = honest
    tried = list(lies(deployment, truth, deployed.mean, progress))
    chances = Chances(alpha=options.rule.alpha).of_vectors(beside.width)

    def clearing(lie: Lie, share: float, nonces: int) -> float:
        errors, met = mixed(deployed.errors, lie.errors, share)
        node = beside.of_node(errors, null)
        drawn = draws(len(node), options.runs, nonces, met)
        return simulated(node, null, chances, drawn).cleared / options.runs

    sizes = progress.over("the price of a cleared lie", SAMPLES)
    return tuple(dearest(tried, nonces, clearing) for nonces in sizes)


def _null(
    deployment: CheckpointDeployment,
    options: AuditOptions,
    shown: Mapping[str, RunFigures],
    beside: Beside,
) -> HonestPopulations:
    """What honest means; the footprint that clears is the one of the deployed kernel here."""
    runs = HonestRuns(shown, {DEPLOYED}, beside.lengths, deployment.width)
    here = populations(runs, deployment.reference)
    known = options.honest(deployment.reference) if options.honest else here
    kept = here.expecting(beside.between_orders, deployment.width).footprints
    return replace(known, footprints={DEPLOYED: kept.get(DEPLOYED, kept[deployment.reference])})


def _all_of(prover: AuditedProver, nonces: Sequence[int], progress: Progress) -> Vectors:
    found = vectors_by(prover, nonces, progress)
    if len(found) < len(nonces):
        raise ReportedError(
            f"the vectors of {prover.name} are not all finite; repair the checkpoint,"
            " or choose another dtype"
        )
    return found


def _predictions(
    deployment: CheckpointDeployment, nonces: Sequence[int], progress: Progress
) -> dict[str, Errors]:
    found, names = {}, deployment.names
    for name in progress.over(f"{len(names)} suspects on {len(nonces)} nonces", names):
        predicted = deployment.predictions(name, nonces)
        found[name] = np.array([predicted[nonce] for nonce in nonces])
    return found


def _results(
    seen: Sequence[ProverMeasurement],
    options: AuditOptions,
    null: HonestPopulations,
    beside: Beside,
    progress: Progress,
) -> tuple[ProverResult, ...]:
    """Verifications of provers by the populations ``null``."""
    rule, runs = options.rule, options.runs
    chances = Chances(rule.alpha, 1.0 - rule.power).of_vectors(beside.width)
    results = []
    for each in progress.over("simulating verifications", seen):
        node = beside.of_node(each.errors, null)
        drawn = draws(len(node), runs, rule.max_nonces, each.chances)
        endings = simulated(node, null, chances, drawn)
        would_convict = endings.nonces_to(endings.convicted_at, rule.power) is not None
        is_cleared = endings.cleared > CLEARED_AT_MOST * runs
        ended = endings.convicted + endings.unexplained
        of_suspects = [of.cosines for of in node.suspects.values()]
        result = ProverResult(
            measurement=each,
            # Judged by the lower end of the interval: the true rate is rarely below it.
            counted=conviction(rule, each.interval[0]),
            endings=endings,
            caught=would_convict and not is_cleared,
            noticed=ended >= (1.0 - CLEARED_AT_MOST) * runs,
            cosines=None if each.chances is not None else np.stack(of_suspects, axis=1),
        )
        results.append(result)
    return tuple(results)
