"""A verdict about claimed artifacts, for ``proofserve verify`` and for workers of a fleet.

The options choose tests (``judges_of``), the tests judge a sample (``judged``), and a report says
what they found.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Literal, NotRequired

from typing_extensions import TypedDict

from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch
from proofserve.protocol.verdict.counting import SequentialResult, SequentialTest
from proofserve.remote.node_client import Unproved
from proofserve.reports import FieldsOf, Progress, ReportedError
from proofserve.verifier.calibration_file import HOW_TO_CALIBRATE, CalibrationFile, GivenThreshold
from proofserve.verifier.claims import BY_PYTORCH, ClaimedArtifacts, Selection
from proofserve.verifier.error_judges import (
    NO_SUSPECTS,
    DirectionJudge,
    FootprintJudge,
    PairedJudge,
)
from proofserve.verifier.judges import (
    ALPHA,
    BETA,
    KEPT_IN_ALL,
    SHARE,
    Chances,
    CountJudge,
    CountRule,
    Judge,
    KernelBank,
    OpinionRecord,
    Variant,
)
from proofserve.verifier.populations import HonestPopulations, OwnRun, uncalibrated
from proofserve.verifier.verification import ExactJudge, Truth, Verification, settled, verify

# The most mismatches that the lines name.
SHOWN: Final = 10
COUNT, PAIRED, DIRECTION, FOOTPRINT = TESTS = ("count", "paired", "direction", "footprint")
# It needs an engine whose bits count, and runs before the others.
EXACT: Final = "exact"
# They can convict, so they share alpha; a footprint only says whether a kernel explains a node.
CONVICTING: Final = frozenset({COUNT, PAIRED, DIRECTION})
# Why there is no verdict, and which command ends that.
WHAT_TO_MEASURE: Final = (
    "No verdict: no kernel that is known explains these errors, and no fraud that is known."
    " If you trust a node of this kind, name it by --reference URL, or measure it:"
    " proofserve calibrate noise MODEL --other URL --out FILE"
)
_OF_CARDS: Final = ("vLLM on a GPU", "compiled")
# How names begin of the references that a server may have, by words of its processor's name.
_KERNELS: Final[Mapping[str, tuple[str, ...]]] = {
    "with AMX": ("vLLM on x86 with AMX",),
    "with bfloat16": ("vLLM on x86 with bfloat16",),
    "without bfloat16": ("vLLM on x86 without bfloat16",),
    "NVIDIA": _OF_CARDS,
    "AMD Instinct": _OF_CARDS,
}


@dataclass(frozen=True, slots=True)
class ChosenTests:
    """Whether ``exact`` runs, and whether ``judges`` do where it decides nothing.

    ``others`` are those that were named, empty for the default ones.
    """

    exact: bool
    others: tuple[str, ...]
    judges: bool


def chosen_tests(named: Sequence[str], *, has_engine: bool, has_figures: bool) -> ChosenTests:
    """The tests that are asked for, where by default all run that can.

    ``has_figures`` of honest nodes: a threshold or a calibration. Raises ReportedError for an
    unknown test, and unless exact has an engine.
    """
    if unknown := next((test for test in named if test not in (EXACT, *TESTS)), None):
        raise ReportedError(f"--test {unknown}: choose from {', '.join((EXACT, *TESTS))}")
    if EXACT in named and not has_engine:
        raise ReportedError("--test exact: give an engine, --recompute-url NODE or --engine vllm")
    exact = EXACT in named or (not named and has_engine)
    others = tuple(dict.fromkeys(test for test in named if test != EXACT))
    return ChosenTests(exact, others, bool(others) or (not named and (has_figures or not exact)))


@dataclass(frozen=True, slots=True)
class JudgingOptions:
    """``tests`` is empty for the default ones; ``alpha`` and ``beta`` are of the whole verdict.

    ``share`` of forged nonces is what a cleared node has not done; ``kept`` is as of ``Chances``.
    """

    tests: tuple[str, ...] = ()
    alpha: float = ALPHA
    beta: float = BETA
    share: float = SHARE
    p_fraud: float = 0.5
    sequential: bool = True
    threshold: CalibrationFile | GivenThreshold | None = None
    kept: float = KEPT_IN_ALL

    @property
    def calibration(self) -> CalibrationFile | None:
        return self.threshold if isinstance(self.threshold, CalibrationFile) else None

    @property
    def origin(self) -> str:
        return self.threshold.origin if self.threshold else "none; kernels were emulated instead"

    def chances(self) -> Chances:
        """Raises ProtocolError for a number out of range."""
        return Chances(self.alpha, self.beta, self.share, self.kept)

    def count_rule(self) -> CountRule | None:
        """None if the verdict does not count. Raises ProtocolError for a number out of range."""
        counts = COUNT in self.tests or (not self.tests and self.calibration is None)
        if not counts or self.threshold is None:
            return None
        alpha = self.alpha / max(1, len(CONVICTING.intersection(self.tests)))
        test = SequentialTest(self.threshold.p_mismatch, self.p_fraud, alpha, self.beta)
        return CountRule(test, self.threshold.dist_threshold, self.sequential)


def judges_of(
    options: JudgingOptions,
    sample: int,
    truth: Truth,
    orders: Sequence[int | None] = (None,),
    ran_on: Mapping[str, object] | None = None,
) -> list[Judge[ClaimError]]:
    """A judge for each test, which together convict an honest node with a chance of alpha at most.

    ``orders`` are as of ``OwnRun``, ``ran_on`` as of ``ClaimedArtifacts``. Raises as ``tests_of``,
    and ProtocolError for a number out of range.
    """
    bank, rule = truth.validator, options.count_rule()
    suspects = bank.names if bank else None
    tests = tests_of(options, suspects, trusts_nodes=bool(truth.trusted))
    chances = options.chances().of_vectors(truth.width)
    shared = replace(chances, alpha=chances.alpha / max(1, len(CONVICTING.intersection(tests))))
    own = _own_run(options.calibration, bank, truth, orders, ran_on or {}) if bank else None
    judges: list[Judge[ClaimError]] = []
    for test in tests:
        if test == COUNT and rule is not None:
            judges.append(CountJudge(rule, sample))
        elif bank is None or own is None:
            raise AssertionError(f"{test} has no obstacle, so it has what it needs")
        elif test == DIRECTION:
            judges.append(DirectionJudge(bank, own, shared))
        else:
            judges.append((PairedJudge if test == PAIRED else FootprintJudge)(own, shared))
    return judges


def tests_of(
    options: JudgingOptions, suspects: Sequence[str] | None, *, trusts_nodes: bool
) -> tuple[str, ...]:
    """The tests that run: by default all that can, or the count where only a threshold is given.

    ``suspects`` are those of the checkpoint, None without one. Raises ReportedError for a test that
    is unknown or cannot be run here.
    """
    obstacles = dict.fromkeys(TESTS, "")
    if suspects is None:
        needs = "it needs the checkpoint; give --model, or --dist-threshold for the count"
        obstacles |= dict.fromkeys((PAIRED, DIRECTION, FOOTPRINT), needs)
    else:
        obstacles[DIRECTION] = "" if suspects else f"{NO_SUSPECTS}; give --suspect"
        # Trusted nodes are measured in the nonces that are judged.
        if options.calibration is None and not trusts_nodes:
            obstacles[PAIRED] = f"it needs a calibration; {HOW_TO_CALIBRATE}"
    for test in options.tests:
        if test not in TESTS:
            raise ReportedError(f"--test {test}: choose from {', '.join(TESTS)}")
        if reason := obstacles[test]:
            raise ReportedError(f"--test {test}: {reason}")
    if options.tests:
        return options.tests
    if options.threshold is not None and options.calibration is None:
        return (COUNT,)
    tests = tuple(test for test in (PAIRED, DIRECTION, FOOTPRINT) if not obstacles[test])
    if not tests:
        raise ReportedError(f"no test can run: {obstacles[FOOTPRINT]}")
    return tests


def _own_run(
    measured: CalibrationFile | None,
    bank: KernelBank,
    truth: Truth,
    orders: Sequence[int | None],
    ran_on: Mapping[str, object],
) -> OwnRun:
    width = truth.width
    known: Sequence[str] = bank.references
    if measured is not None:
        known = [each for each in known if each in measured.references] or measured.references
    variants = {name: one for one, of in bank.variants.items() for name in of.values()}
    first = references_on(ran_on, known, bank.variants)

    def null(reference: str) -> HonestPopulations:
        if measured is None:
            return uncalibrated(reference, width)
        if reference in truth.trusted:
            return measured.honest(known[0]).of_node(reference, width)
        if reference not in variants:
            return measured.honest(reference)
        # Beside its own run a server on several ranks errs as one on a single rank does.
        one = variants[reference] if variants[reference] in known else measured.references[0]
        return measured.honest(one).on_ranks(reference, width)

    # Of other machines only the references: more variants would be more chances for a lie.
    machine = {"processor": str(ran_on.get("processor")).removesuffix(f", {BY_PYTORCH}")}
    here = references_on(machine, known, bank.variants)
    others = [*known, *(name for name, one in variants.items() if one in here)]
    others = [name for name in others if name not in first]
    return OwnRun(bank, null, first, orders, others, truth.trusted)


def references_on(
    ran_on: Mapping[str, object],
    references: Sequence[str],
    variants: Mapping[str, Mapping[Variant, str]],
) -> Sequence[str]:
    """Those that a server has by its own words, all ``references`` if it does not say.

    So chance does not choose another. Who names a wrong one is compared with the others later.
    """
    processor, ranks = str(ran_on.get("processor")), ran_on.get("ranks")
    found = next((of for words, of in _KERNELS.items() if words in processor), ())
    names = [each for each in references if each.startswith(found)]
    operations: Literal["PyTorch", "vLLM"] = "PyTorch" if BY_PYTORCH in processor else "vLLM"
    several = ranks if isinstance(ranks, int) else 1
    said = Variant(operations, several, by_gloo=several > 1 and "AVX2" in processor)
    if said != Variant():
        names = [of[said] for each in names if said in (of := variants.get(each, {}))]
    return names or references


def orders_by(seed: str) -> tuple[int, int]:
    """Two orders that cut sums far apart; the ``seed`` is unknown before nodes publish."""
    first = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8])
    return first, first + 1


class VerdictRecord(TypedDict):
    """What ``verify --json`` writes: ``VerdictReport`` as JSON. A count has ``rule``, too."""

    verdict: SequentialResult
    nonces_used: int
    nonces_claimed: int
    nonces_left_out: int
    findings: list[OpinionRecord]
    mismatches: list[Annotated[dict[str, Any], FieldsOf(Mismatch)]]
    distances: dict[int, float]
    seed: str
    block_hash: str
    public_key: str
    threshold_from: str
    closest: str
    excluded_share: float | None
    alpha: float
    beta: float
    rule: NotRequired[str]
    count: NotRequired[Annotated[dict[str, Any], FieldsOf(CountRule)]]
    expected: NotRequired[Annotated[dict[str, Any], FieldsOf(Selection)]]


class UnprovedRecord(TypedDict):
    """What it writes if the prover owes what it does not show; ``text`` says why."""

    verdict: Literal[SequentialResult.UNPROVED]
    reason: Unproved
    text: str


@dataclass(frozen=True, slots=True)
class VerdictReport:
    """``rule`` is that of the count, None if it was not run; ``origin`` that of honest figures.

    ``how`` says what was done with the nonces of the sample.
    """

    outcome: Verification
    claimed: ClaimedArtifacts
    seed: str
    options: JudgingOptions
    origin: str
    rule: CountRule | None = None
    how: str = "recomputed"

    def after(self, earlier: "VerdictReport") -> "VerdictReport":
        """This one, with the opinions of a test that was run before and decided nothing."""
        # What is withheld, and an unknown lane, is said once.
        said = {each.test for each in self.outcome.opinions}
        before = (each for each in earlier.outcome.opinions if each.test not in said)
        opinions = (*before, *self.outcome.opinions)
        return replace(self, outcome=replace(self.outcome, opinions=opinions))

    def lines(self) -> Iterator[str]:
        outcome = self.outcome
        used = f"{outcome.nonces_used} of {len(self.claimed.nonces)} nonces {self.how}"
        yield f"{used} (to reproduce this sample: --seed {self.seed})"
        yield f"Block {self.claimed.block_hash}, key {self.claimed.public_key}."
        if self.claimed.left_out:
            yield f"{self.claimed.left_out} nonces of the lane are left out, below the last claim."
        if self.claimed.unknown_lane:
            yield f"The lane is not known: {self.claimed.unknown_lane}."
        for opinion in outcome.opinions:
            yield f"  {opinion.test:9} {opinion.result}: {opinion.text}"
        mismatches = self._mismatches
        for each in mismatches[:SHOWN]:
            far = "" if each.distance is None else f" by {each.distance:.4f}"
            yield f"  nonce {each.nonce}: {each.reason}{far} {each.detail}".rstrip()
        if (more := len(mismatches) - SHOWN) > 0:
            yield f"  and {more} more"
        if self.rule is not None:
            yield self.rule.description
        if outcome.verdict is SequentialResult.UNEXPLAINED:
            yield WHAT_TO_MEASURE
        if {opinion.test for opinion in outcome.opinions} == {PAIRED}:
            yield f"{PAIRED} alone can only convict: --test {FOOTPRINT} besides can clear a node."
        if (share := self._excluded_share()) is not None:
            condition = f", if {text}," if (text := self._figure("excluded_if")) else ""
            yield (
                f"A node that forges {share:.0%} of its nonces or more{condition} would have been"
                f" cleared with a chance of {self.options.beta:g} at most."
            )
        yield f"Honest nodes: {self.origin}."

    @property
    def reason(self) -> str:
        """What decided, in a line."""
        outcome = self.outcome
        deciding = (each for each in outcome.opinions if each.result is outcome.verdict)
        said = "; ".join(f"{each.test}: {each.text}" for each in deciding)
        return f"{outcome.nonces_used} of {len(self.claimed.nonces)} nonces; {said}"

    @property
    def closest(self) -> str:
        """The honest kernel whose footprint the node has most of; empty if no test asked."""
        return self._figure("kernel")

    def _figure(self, name: str) -> str:
        """The first of a test; empty if none has it."""
        found = (opinion.figures.get(name) for opinion in self.outcome.opinions)
        return next((str(each) for each in found if each), "")

    def record(self) -> VerdictRecord:
        outcome, rule = self.outcome, self.rule
        made: VerdictRecord = {
            "verdict": outcome.verdict,
            "nonces_used": outcome.nonces_used,
            "nonces_claimed": len(self.claimed.nonces),
            "nonces_left_out": self.claimed.left_out,
            "findings": [asdict(opinion) for opinion in outcome.opinions],
            "mismatches": [asdict(mismatch) for mismatch in self._mismatches],
            "distances": {e.nonce: e.distance for e in outcome.errors if e.broken is None},
            "seed": self.seed,
            "block_hash": self.claimed.block_hash,
            "public_key": self.claimed.public_key,
            "threshold_from": self.origin,
            "closest": self.closest,
            "excluded_share": self._excluded_share(),
            "alpha": self.options.alpha,
            "beta": self.options.beta,
        }
        if rule is not None:
            made |= {"rule": rule.description, "count": asdict(rule)}
        return made

    def _excluded_share(self) -> float | None:
        """The least share of forged nonces that the verdict excludes, if it clears."""
        if self.outcome.verdict is not SequentialResult.HONEST:
            return None
        found = (opinion.figures.get("excluded_share") for opinion in self.outcome.opinions)
        return min((float(share) for share in found if share is not None), default=None)

    @property
    def _mismatches(self) -> tuple[Mismatch, ...]:
        return self.outcome.mismatches(self.rule.dist_threshold if self.rule else math.inf)


def judged(
    claimed: ClaimedArtifacts,
    truth: Truth,
    options: JudgingOptions,
    seed: str,
    most: int | None,
    progress: Progress,
) -> VerdictReport:
    """Recompute ``most`` nonces of ``claimed`` that ``seed`` draws, all for None, and judge them.

    Raises ReportedError for another checkpoint than the prover's, a test that cannot be run here,
    and an incomplete recomputation; ProtocolError for a number out of range; EngineFault.
    """
    claimed.require_digest(truth.weights_digest)
    sample = draw(claimed.nonces, seed, most)
    judges = judges_of(options, len(sample), truth, orders_by(seed), claimed.ran_on)
    outcome = settled(verify(claimed, sample, truth, judges, progress), claimed, truth)
    return VerdictReport(outcome, claimed, seed, options, options.origin, options.count_rule())


def exactly_judged(
    claimed: ClaimedArtifacts,
    engine: Truth,
    options: JudgingOptions,
    seed: str,
    most: int | None,
    progress: Progress,
) -> VerdictReport:
    """Compare the bits of the first nonces of ``judged``'s sample. Raises as it, and NodeError."""
    claimed.require_digest(engine.weights_digest)
    judge = ExactJudge(options.chances(), engine.facts, claimed.ran_on)
    sample = draw(claimed.nonces, seed, most)[: judge.needed]
    ours = replace(engine, unit=f"nonces, by {engine.name}")
    outcome = settled(verify(claimed, sample, ours, [judge], progress), claimed, ours)
    origin = f"those whose bits are equal to the vectors of {engine.name}"
    return VerdictReport(outcome, claimed, seed, options, origin)
