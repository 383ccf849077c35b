"""A probe: prompts in groups, until the answers are enough for a verdict, and what that says."""

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from proofserve.lab.chats import WORDS
from proofserve.lab.report import LabError, Progress
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.judges import Chances, Judge, Opinion
from proofserve.verifier.probe.block_judges import BlockJudges
from proofserve.verifier.probe.endpoint import Endpoint, Kind, LeftOut, ProbePrompt, RawAnswer
from proofserve.verifier.probe.readings import ProbeAnswer, ReadAnswer, Readings, resolved
from proofserve.verifier.probe.token_judges import GreedyJudge, LikelihoodJudge, TokenJudge
from proofserve.verifier.verification import CERTAIN, verdict_of

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator

_REQUESTS = (
    "Write a short story about a {} and a {}. Mention the {}.",
    "Explain to a child how a {} differs from a {}, with an example about a {}.",
    "Describe a {} {} in the {} as vividly as you can.",
    "Give three reasons why a {} {} needs a {}.",
    "What would you ask the owner of a {} {} about the {}?",
    "Continue this sentence with a whole paragraph: the {} {} near the {}",
)
_BEGINNINGS = (
    "The {} of the {} was known for its {}, and",
    "Once there was a {} {} beside the {}. It",
    "Notes on the {}, the {} and the {}:\n\n1.",
    "In the {} stood a {} {}, which",
    "A {} is not a {}. The {}",
)
# A suspect whose mean cosine with the errors is as large explains them, whatever their size. What
# convicts by a cosine is named at a smaller one: rounding may be as large as what it adds to.
EXPLAINING_COSINE: Final = 0.5
# Tokens that are so much less likely than drawn ones (nats each) are another model's.
OTHER_SURPRISE: Final = 0.5
# A suspect explains greedy tokens if its own gaps are together at most this share of ours.
EXPLAINED_GAPS: Final = 0.3
# Blocks whose cosines are looked at.
_BLOCKS: Final = 16
# Errors so many times our own rounding, or tokens so much less likely than drawn ones (nats each),
# or so large a share of greedy tokens that are not the model's: no rounding in 8 bits does it.
OTHER_RATIO: Final = 5.0
OTHER_SHARE: Final = 0.3
# Evidence (a natural logarithm) that shows where a test is going.
_LIKELY: Final = 3.0
# More prompts than this are never.
_MOST: Final = 1e6
# Without this share of judged answers no endpoint is honest: it may have spoilt the others.
LEAST_JUDGED: Final = 0.5

UNEXPLAINED: Final = "no honest kernel that is emulated explains the answers, and no known weights"
# Tests that share alpha: tokens and likelihood, or tokens, sizes and directions. The test of greedy
# tokens is a bound and has no alpha.
_WITHOUT_LOGS, _WITH_LOGS = 2, 3
_TOKENS_CLEAR: Final = ("tokens", "likelihood")
_LOGS_CLEAR: Final = ("tokens", "paired", "direction")


def prompts(seed: str, count: int, kinds: Sequence[Kind]) -> Iterator[ProbePrompt]:
    """``count`` prompts of ``kinds`` in turn; a seed gives the same ones each time.

    One of each kind is sampled, then one of each greedy. Of four prompts in a row with two kinds
    there is one of every sort.
    """
    draw = random.Random(f"proofserve probe {seed}")  # noqa: S311 - a prompt, no secret
    seen: set[str] = set()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        templates = _REQUESTS if kind is Kind.CHAT else _BEGINNINGS
        while (text := draw.choice(templates).format(*draw.sample(WORDS, 3))) in seen:
            pass
        seen.add(text)
        yield ProbePrompt(number, kind, text, greedy=number // len(kinds) % 2 == 1)


def by_blocks(sizes: BlockJudges, opinions: Sequence[Opinion]) -> tuple[str | None, list[float]]:
    """The suspect that explains the errors of the blocks, and its cosines. Raises EngineFault."""
    convicted = [
        str(each.figures["suspect"])
        for each in opinions
        if each.result is SequentialResult.FRAUD and "suspect" in each.figures
    ]
    if not sizes.errors:
        return None, []
    if convicted:
        return convicted[0], sizes.cosines(convicted[0], len(sizes.errors))
    means = {name: float(np.mean(sizes.cosines(name, _BLOCKS))) for name in sizes.names}
    best = max(means, key=means.__getitem__)
    if means[best] < EXPLAINING_COSINE:
        return None, []
    return best, sizes.cosines(best, len(sizes.errors))


def by_tokens(readings: Readings, answers: Sequence[ReadAnswer]) -> str | None:
    """The suspect that explains the tokens alone. Raises EngineFault."""
    scores = {name: _score(readings, name, answers) for name in readings.names}
    known = {name: score for name, score in scores.items() if score is not None}
    return max(known, key=known.__getitem__) if known else None


def _score(readings: Readings, name: str, answers: Sequence[ReadAnswer]) -> float | None:
    """By how much the tokens are likelier with the suspect; None if it does not explain them."""
    greedy = [each for each in answers if each.answer.prompt.greedy]
    sampled = [each for each in answers if not each.answer.prompt.greedy]
    left = sum(float(each.gaps.sum()) for each in readings.by_suspect(name, greedy))
    gaps = sum(float(each.gaps.sum()) for each in greedy)
    pairs = zip(sampled, readings.by_suspect(name, sampled), strict=True)
    likelier = sum(float((by.log_p - each.log_p).sum()) for each, by in pairs)
    if gaps > 0.0 and left > EXPLAINED_GAPS * gaps:
        return None
    tokens = sum(len(each.log_p) for each in sampled)
    if surprise_of(answers) * tokens - likelier >= OTHER_SURPRISE * max(1, tokens):
        return None
    return likelier + gaps - left


def surprise_of(answers: Sequence[ReadAnswer]) -> float:
    """That of all sampled tokens; 0 without any."""
    sampled = [each for each in answers if not each.answer.prompt.greedy]
    tokens = sum(len(each.log_p) for each in sampled)
    return sum(each.surprise * len(each.log_p) for each in sampled) / max(1, tokens)


def prompts_more(
    opinions: Sequence[Opinion], clearing: Collection[str], chances: Chances, judged_prompts: int
) -> float | None:
    """About how many more prompts lead to a verdict; None if nothing shows it yet.

    All tests that can clear must do so, and one is enough to convict.
    """
    to_clear, to_convict = 0.0, math.inf
    for each in opinions:
        if each.test in clearing and each.result is not SequentialResult.HONEST:
            to_clear = max(to_clear, _missing(each, chances))
        log_evidence = float(each.figures.get("log_evidence", 0.0))
        if log_evidence > _LIKELY:
            to_convict = min(to_convict, (chances.convicts_at + _LIKELY) / log_evidence - 1.0)
    missing = judged_prompts * (to_clear if to_convict == math.inf else to_convict)
    return max(1.0, missing) if 0.0 < missing < _MOST else None


def _missing(opinion: Opinion, chances: Chances) -> float:
    """How many times as many nonces as so far the test needs to clear."""
    if "missing" in opinion.figures:
        return float(opinion.figures["missing"])
    log_clearing = float(opinion.figures.get("log_clearing", 0.0))
    return chances.clears_at / log_clearing - 1.0 if log_clearing > 0.0 else math.inf


def _about(prompts: float) -> str:
    """Two digits are more than such an estimate has."""
    digits = 10 ** max(0, len(str(int(prompts))) - 2)
    return f"about {-(-int(prompts + 1) // digits) * digits} more prompts"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found, after ``asked`` prompts; None is what was not measured.

    ``suspect`` explains what was seen, None if none does, and ``cosines`` are those of the blocks
    with it. ``surprise`` is that of ReadAnswer over all sampled tokens, ``beyond`` the share of
    greedy tokens that are no honest ones. ``more`` says what an undecided probe needs.

    ``ratios`` are the errors of each block over our own rounding, ``evidence`` is that of the token
    test after each answer, ``bound`` that of the greedy gaps. ``unseen`` are suspects that cannot
    be told from the published weights, ``forwards`` counts answers read by suspects.
    """

    verdict: SequentialResult
    suspect: str | None
    cosines: tuple[float, ...]
    surprise: float | None
    beyond: float
    more: str
    opinions: tuple[Opinion, ...]
    answers: tuple[ReadAnswer, ...]
    left_out: tuple[LeftOut, ...]
    ratios: tuple[float, ...]
    unseen: tuple[str, ...]
    evidence: tuple[float, ...]
    bound: float
    asked: int
    forwards: int
    prompt_tokens: int
    output_tokens: int

    @property
    def ratio(self) -> float | None:
        """The median of the errors over our own rounding."""
        return float(np.median(self.ratios)) if self.ratios else None

    @property
    def label(self) -> str:
        """One of honest, cannot tell, quantised and another model."""
        if self.verdict is SequentialResult.HONEST:
            return "honest"
        if self.verdict is not SequentialResult.FRAUD:
            return "cannot tell"
        return "another model" if self.suspect is None else "quantised"

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.verdict is SequentialResult.HONEST:
            return "honest: the answers are the checkpoint's"
        if self.verdict is SequentialResult.UNEXPLAINED:
            return f"cannot tell: {UNEXPLAINED}"
        if self.verdict is SequentialResult.UNDECIDED:
            return f"cannot tell, {self.more}"
        if self.suspect is not None:
            return f"quantised: {self.suspect}"
        size = "" if self.ratio is None else f": errors {self.ratio:.1f} times our rounding"
        far = (
            (self.ratio or 0.0) >= OTHER_RATIO
            or (self.surprise or 0.0) >= OTHER_SURPRISE
            or self.beyond >= OTHER_SHARE
        )
        which = "another model" if far else "another model, or weights changed in no known way"
        return f"{which}{size}"


class Probing:
    """Judges answers one after the other. The methods raise EngineFault."""

    def __init__(
        self, tokens: "CheckpointTokenizer", reader: "CheckpointValidator", chances: Chances
    ) -> None:
        self._tokens = tokens
        self._readings = Readings(reader)
        self._chances = chances
        self._answers: list[ReadAnswer] = []
        self._left_out: list[LeftOut] = []
        self._evidence: list[float] = []
        self._used = [0, 0]
        self._began = False
        self._greedy = GreedyJudge(self._readings)
        self._drawn = TokenJudge(self._readings, chances, all_fields=True)
        self._likelihood: LikelihoodJudge | None = None
        self._sizes: BlockJudges | None = None

    def add(self, raws: Sequence[RawAnswer | LeftOut], all_fields: bool = True) -> SequentialResult:
        """Judge a group, up to a verdict.

        ``all_fields`` says of the first group whether the endpoint took all fields of a request.
        """
        known = [r if isinstance(r, LeftOut) else resolved(r, self._tokens) for r in raws]
        for each in raws:
            if isinstance(each, RawAnswer):
                self._used[0] += each.prompt_tokens or 0
                self._used[1] += each.completion_tokens or 0
        answers = [each for each in known if isinstance(each, ProbeAnswer)]
        lost = [each for each in known if isinstance(each, LeftOut)]
        self._left_out += lost
        if answers and not self._began:
            self._begin(answers, all_fields)
        for each in lost:
            if each.unsure and not each.prompt.greedy:
                self._drawn.lose()
        reads = self._readings.read(answers)
        if self._likelihood is not None:
            self._likelihood.prepare(reads)
        for read in reads:
            self._judge(read)
            if self.result in CERTAIN:
                break
        return self.result

    @property
    def result(self) -> SequentialResult:
        return self._verdict[0]

    @property
    def _verdict(self) -> tuple[SequentialResult, int]:
        """The result, and which of the emulated kernels explains the answers best."""
        found, closest = verdict_of(self._judges)
        few = len(self._answers) < LEAST_JUDGED * (len(self._answers) + len(self._left_out))
        unsure = self._sizes is not None and not self._sizes.can_clear
        if found is SequentialResult.HONEST and (few or unsure):
            return SequentialResult.UNDECIDED, closest
        return found, closest

    @property
    def _judges(self) -> tuple[Judge[Any], ...]:
        more: Sequence[Judge[Any]] = self._sizes.judges if self._sizes is not None else ()
        if self._likelihood is not None:
            more = (self._likelihood,)
        return (self._drawn, self._greedy, *more)

    def probed(self, asked: int) -> ProbeResult:
        opinions, sizes = self._opinions(), self._sizes
        suspect, cosines = self._explaining(opinions)
        drawn = any(not each.answer.prompt.greedy for each in self._answers)
        return ProbeResult(
            verdict=self.result,
            suspect=suspect,
            cosines=tuple(cosines),
            surprise=surprise_of(self._answers) if drawn else None,
            beyond=self._greedy.share,
            more=self._more(),
            opinions=opinions,
            answers=tuple(self._answers),
            left_out=tuple(self._left_out),
            ratios=tuple(sizes.ratios) if sizes else (),
            unseen=sizes.unseen if sizes else (),
            evidence=tuple(self._evidence),
            bound=self._greedy.bound,
            asked=asked,
            forwards=self._readings.forwards,
            prompt_tokens=self._used[0],
            output_tokens=self._used[1],
        )

    def _explaining(self, opinions: Sequence[Opinion]) -> tuple[str | None, Sequence[float]]:
        """The suspect that explains a fraud, and the cosines of the blocks with it."""
        if self.result is not SequentialResult.FRAUD:
            return None, ()
        if self._sizes is not None:
            return by_blocks(self._sizes, opinions)
        return by_tokens(self._readings, self._answers), ()

    def _begin(self, answers: Sequence[ProbeAnswer], all_fields: bool) -> None:
        """Choose the tests by what the first answers have."""
        self._began = True
        logs = any(len(top.ids) > 1 for each in answers for top in each.tops)
        tests = _WITH_LOGS if logs else _WITHOUT_LOGS
        shared = replace(self._chances, alpha=self._chances.alpha / tests)
        self._drawn = TokenJudge(self._readings, shared, all_fields)
        if logs:
            self._sizes = BlockJudges(self._readings, shared)
        else:
            self._likelihood = LikelihoodJudge(self._readings, shared)

    def _judge(self, read: ReadAnswer) -> None:
        self._answers.append(read)
        self._drawn.add(read)
        self._greedy.add(read)
        self._evidence.append(self._drawn.log_evidence)
        if self._sizes is not None:
            self._sizes.add(read)
        if self._likelihood is not None:
            self._likelihood.add(read)

    def _opinions(self) -> tuple[Opinion, ...]:
        closest = self._verdict[1]
        return tuple(judge.opinion(closest) for judge in self._judges)

    def _more(self) -> str:
        if not self._answers:
            reason = f": {self._left_out[0].reason}" if self._left_out else ""
            return f"no answer can be judged{reason}"
        if len(self._answers) < LEAST_JUDGED * (len(self._answers) + len(self._left_out)):
            return "too many answers had to be left out"
        opinions = self._opinions()
        clearing = _LOGS_CLEAR if self._sizes is not None else _TOKENS_CLEAR
        number = prompts_more(opinions, clearing, self._chances, len(self._answers))
        return "nothing yet shows how many more prompts" if number is None else _about(number)


def probe(
    endpoint: Endpoint,
    prompts: Sequence[ProbePrompt],
    probing: Probing,
    at_once: int,
    progress: Progress,
) -> ProbeResult:
    """Ask group after group, until the verdict is certain or the prompts end.

    Raises LabError if the endpoint refuses every route, NodeError if it does not answer.
    """
    asked, left = 0, list(prompts)
    while left:
        group, left = left[:at_once], left[at_once:]
        progress.step(f"asking prompts {asked + 1} to {asked + len(group)}, {len(left)} left")
        answers = endpoint.ask(group)
        if endpoint.refused:
            # A route that is not there is no answer left out: the other one is asked alone.
            left = [each for each in left if each.kind not in endpoint.refused]
            answers = [each for each in answers if each.prompt.kind not in endpoint.refused]
        if not endpoint.settled:
            raise LabError("; ".join(endpoint.refused.values()))
        asked += len(answers)
        progress.step(f"judging {len(answers)} answers")
        all_fields = all(each.more_fields for each in endpoint.settled.values())
        if probing.add(answers, all_fields) in CERTAIN:
            break
    return probing.probed(asked)
