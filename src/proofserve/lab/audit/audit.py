"""Attacks on a deployment, measured; and which of them its validators would convict."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.attacks import Attack, AuditedDeployment, attacks
from proofserve.lab.audit.conviction import Conviction, ConvictionRule, PowerAnalysis
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.verification import Recompute, Vectors
from proofserve.protocol.codec import to_float16
from proofserve.protocol.statistics import rate_interval
from proofserve.rounds.calls import chunks

# Shares of the nonces that a cautious cheat forges; the others it computes as it should.
FORGED_SHARES = (0.10, 0.05, 0.02)
# A cheat that saves less than this share of the compute is told of, but fails no deployment.
WORTHWHILE = 0.10
# What is forged on the other nonces saves nearly everything.
FORGERY_SAVES = 0.90
# Two vectors of length 1 are at most so far apart; one that is missing counts as that.
FARTHEST = 2.0
# Attacks that the verdict names.
NAMED = 3
# Nonces between two signs of progress.
AT_ONCE = 16

Distances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Evidence:
    """How far vectors were from the validator's, and how often beyond the threshold.

    ``rate`` is the share of mismatches and ``interval`` holds the true one 19 times in 20. What
    was put together from other evidence has no ``distances`` of its own, else float64 [nonces].
    """

    name: str
    saving: float
    mean: float
    sd: float
    rate: float
    interval: tuple[float, float]
    distances: Distances | None = None


@dataclass(frozen=True, slots=True)
class AttackFinding:
    """An attack, what convicts it, and, where nothing does, what would be needed."""

    evidence: Evidence
    conviction: Conviction
    needed: str

    @property
    def caught(self) -> bool:
        """Whether the fixed test convicts within the most nonces, at the lower end of the rate."""
        return self.conviction.fixed is not None

    @property
    def escapes(self) -> bool:
        """Whether it fails the deployment: not caught, and worth the trouble."""
        return not self.caught and self.evidence.saving >= WORTHWHILE


@dataclass(frozen=True, slots=True)
class Audit:
    """What was found. ``honest`` is the model as deployed, against the validator's vectors."""

    rule: ConvictionRule
    honest: Evidence
    findings: tuple[AttackFinding, ...]

    @property
    def convicts_honest(self) -> bool:
        """Whether honest vectors surely mismatch more often than the rule allows."""
        return self.honest.interval[0] > self.rule.p_mismatch

    @property
    def passed(self) -> bool:
        """Whether honest nodes are safe and every cheat that is worth it is caught."""
        return not self.convicts_honest and not any(each.escapes for each in self.findings)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.convicts_honest:
            return (
                f"UNFIT: {self.honest.rate:.1%} of honest vectors are beyond the threshold of"
                f" {self.rule.dist_threshold:g}, so that honest nodes would be convicted"
            )
        missed = [each.evidence for each in self.findings if not each.caught]
        within = f"within {self.rule.max_nonces} nonces"
        if not missed:
            return f"CAUGHT: every attack {within}"
        if self.passed:
            return f"CAUGHT: every attack worth {WORTHWHILE:.0%} {within}; not {_named(missed)}"
        return f"NOT CAUGHT {within}: {_named(missed)}"


def audit(
    deployment: AuditedDeployment, rule: ConvictionRule, nonces: int, progress: Progress
) -> Audit:
    """Run every attack on ``nonces`` nonces each, and judge it.

    Raises LabError if the validator could not compute all of them, and ValueError for less than
    one nonce.
    """
    if nonces < 1:
        raise ValueError(f"{nonces} nonces tell nothing")
    bench = _Bench(range(nonces), rule.dist_threshold, progress)
    truth = bench.vectors("recomputing as a validator", deployment.validator)
    if len(truth) < nonces:
        raise LabError("the validator's own vectors are not all finite; mend the checkpoint")
    honest = bench.evidence(Attack("honest", 0.0, deployment.honest), truth)
    seen = [bench.evidence(attack, truth) for attack in attacks(deployment)]
    seen += mixtures(honest, seen)
    progress.step("working out what convicts", len(seen))
    court = PowerAnalysis(rule)
    findings = []
    for each in seen:
        findings.append(finding(each, honest, court))
        progress.advance()
    return Audit(rule, honest, tuple(findings))


def evidence_of(name: str, saving: float, distances: Distances, dist_threshold: float) -> Evidence:
    """What ``distances`` float64 [nonces] say."""
    # The comparison of a validator (protocol B.4) is in float32.
    beyond = int((distances.astype(np.float32) > np.float32(dist_threshold)).sum())
    return Evidence(
        name=name,
        saving=saving,
        mean=float(distances.mean()),
        sd=float(distances.std()),
        rate=beyond / len(distances),
        interval=rate_interval(beyond, len(distances)),
        distances=distances,
    )


def mixtures(honest: Evidence, forged: Sequence[Evidence]) -> list[Evidence]:
    """Nodes that compute most nonces and forge the rest in the way that mismatches least.

    Which nonces, nobody can foresee: each of a validator's sample is forged with the same chance.
    Empty without a forgery that saves nearly everything.
    """
    cheap = [each for each in forged if each.saving >= FORGERY_SAVES]
    if not cheap:
        return []
    best = min(cheap, key=lambda each: (each.interval[0], each.mean))
    return [_mixture(honest, best, share) for share in FORGED_SHARES]


def finding(evidence: Evidence, honest: Evidence, court: PowerAnalysis) -> AttackFinding:
    """Judge by the lower end of the rate's interval: what is called caught is caught."""
    conviction = court.conviction(evidence.interval[0])
    needed = "" if conviction.fixed is not None else _needed(evidence, honest, court)
    return AttackFinding(evidence, conviction, needed)


def _named(missed: Sequence[Evidence]) -> str:
    """The attacks that are worth the most, and how many more there are."""
    ranked = sorted(missed, key=lambda each: each.saving, reverse=True)
    names = [f"{each.name} (saves {each.saving:.0%})" for each in ranked[:NAMED]]
    more = len(ranked) - NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def _mixture(honest: Evidence, forged: Evidence, share: float) -> Evidence:
    def mixed(of_honest: float, of_forged: float) -> float:
        return (1.0 - share) * of_honest + share * of_forged

    mean = mixed(honest.mean, forged.mean)
    square = mixed(honest.mean**2 + honest.sd**2, forged.mean**2 + forged.sd**2)
    return Evidence(
        name=f"honest on {1.0 - share:.0%}, else {forged.name}",
        saving=share * forged.saving,
        mean=mean,
        sd=math.sqrt(max(0.0, square - mean**2)),
        rate=mixed(honest.rate, forged.rate),
        interval=(
            mixed(honest.interval[0], forged.interval[0]),
            mixed(honest.interval[1], forged.interval[1]),
        ),
    )


def _needed(evidence: Evidence, honest: Evidence, court: PowerAnalysis) -> str:
    """What would catch it: more nonces, or a lower threshold if honest nodes can bear it."""
    rate = evidence.interval[0]
    ways = []
    if rate > court.rule.p_mismatch and (more := court.nonces_beyond(rate)) is not None:
        ways.append(f"{more} nonces")
    if evidence.distances is not None and honest.distances is not None:
        ways.append(_lower_threshold(evidence.distances, honest.distances, court))
    return ", or ".join(ways) or "whatever catches what it forges"


def _lower_threshold(made: Distances, honest: Distances, court: PowerAnalysis) -> str:
    needed = court.mismatches_needed(len(made))
    if needed is None:
        return "a measurement of more nonces"
    bound = float(np.sort(made)[-needed])
    beyond = int((honest >= bound).sum())
    if rate_interval(beyond, len(honest))[0] > court.rule.p_mismatch:
        return f"a threshold below {bound:.2g}, which convicts honest nodes as well"
    return f"a threshold below {bound:.2g} (honest: up to {honest.max():.2g})"


class _Bench:
    """Computes the same nonces again and again, and tells how far it is."""

    def __init__(self, nonces: Sequence[int], dist_threshold: float, progress: Progress) -> None:
        self._nonces = nonces
        self._dist_threshold = dist_threshold
        self._progress = progress

    def vectors(self, title: str, prepare: Callable[[], Recompute]) -> Vectors:
        """What a prover answers, a few nonces at a time so that progress can be seen."""
        self._progress.step(f"{title}: {len(self._nonces)} nonces", len(self._nonces))
        answer = prepare()
        found: dict[int, NDArray[np.float32]] = {}
        for chunk in chunks(self._nonces, AT_ONCE):
            found |= answer(chunk)
            for _ in chunk:
                self._progress.advance()
        return found

    def evidence(self, attack: Attack, truth: Vectors) -> Evidence:
        """Make the vectors of ``attack`` and hold them against ``truth``."""
        made = self.vectors(attack.name, attack.prepare)
        apart = [_distance(truth[nonce], made.get(nonce)) for nonce in self._nonces]
        return evidence_of(attack.name, attack.saving, np.array(apart), self._dist_threshold)


def _distance(ours: NDArray[np.float32], theirs: NDArray[np.float32] | None) -> float:
    """As a validator takes it, both rounded to the wire's float16 (protocol B.4)."""
    if theirs is None:
        return FARTHEST
    ours, theirs = (to_float16(vector).astype(np.float32) for vector in (ours, theirs))
    return float(np.linalg.norm(ours - theirs))
