"""A probe: prompts in groups, until the answers are enough for a verdict, and what that says."""

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.prompts import WORDS
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.judges import Chances, Judge, Opinion
from proofserve.verifier.probe.block_judges import BlockJudges
from proofserve.verifier.probe.endpoint import (
    Alternatives,
    Endpoint,
    Kind,
    LeftOut,
    ProbePrompt,
    RawAnswer,
)
from proofserve.verifier.verification import CERTAIN, verdict_of
from proofserve.verifier.written.judges import GreedyJudge, LikelihoodJudge, TokenJudge
from proofserve.verifier.written.readings import ReadAnswer, Readings, TopLogs, WrittenAnswer

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
# Tokens that are so much less likely than drawn ones (nats each) are another model's.
OTHER_SURPRISE: Final = 0.5
# A suspect explains greedy tokens if its own gaps are together at most this share of ours.
EXPLAINED_GAPS: Final = 0.3
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
_LOGS_CLEAR: Final = ("tokens", "direction", "footprint")
# How vLLM writes a token if it is asked for ids.
_ID_PREFIX: Final = "token_id:"
# Servers write minus infinity as a large negative number, because JSON has none.
_LEAST_LOG: Final = -1000.0
FROM_SERVER, FROM_LOGS, FROM_TEXT = "token ids", "log-probabilities", "the text"


def prompts(seed: str, count: int, kinds: Sequence[Kind]) -> Iterator[ProbePrompt]:
    """``count`` prompts of ``kinds`` in turn, by turns greedy; a seed gives the same ones."""
    draw = random.Random(f"proofserve probe {seed}")  # noqa: S311 - a prompt, no secret
    seen: set[str] = set()
    for number in range(count):
        kind = kinds[number % len(kinds)]
        templates = _REQUESTS if kind is Kind.CHAT else _BEGINNINGS
        while (text := draw.choice(templates).format(*draw.sample(WORDS, 3))) in seen:
            pass
        seen.add(text)
        yield ProbePrompt(number, kind, text, greedy=number // len(kinds) % 2 == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer(WrittenAnswer):
    """An answer whose token ids are known; ``ids_from`` says by what.

    There is an id of the prompt, and of the answer, at least. All tokens are read.
    """

    prompt: ProbePrompt
    text: str
    ids_from: str

    @property
    def number(self) -> int:
        return self.prompt.number


def resolved(raw: RawAnswer, tokens: "CheckpointTokenizer") -> ProbeAnswer | LeftOut:
    """The answer in token ids, or why they are not sure."""
    prompt = raw.prompt
    prompt_ids = tokens.prompt_ids(prompt.request)
    if fault := _other_prompt(raw, prompt_ids):
        return LeftOut(prompt, fault)
    if not raw.text and not raw.output_ids and not raw.alternatives:
        return LeftOut(prompt, "the answer is empty")
    found = _output_ids(raw, tokens)
    if found is None:
        return LeftOut(prompt, "the token ids of the answer cannot be told from its text", True)
    output, ids_from = found
    if not output or not all(0 <= each < tokens.size for each in output):
        return LeftOut(prompt, "the answer has no tokens, or such as the checkpoint has not")
    if raw.alternatives and len(output) == len(raw.alternatives) + 1 and raw.ended:
        output = output[:-1]
    if raw.alternatives and not _same_tokens(output, raw.alternatives, tokens):
        return LeftOut(prompt, "the log-probabilities are of other tokens than the answer")
    pairs = zip(raw.alternatives, output, strict=True) if raw.alternatives else ()
    tops = tuple(_top_logs(each, token, tokens) for each, token in pairs)
    # As the requests ask for; nothing but the temperature changes the logits.
    sampling = Sampling(temperature=0.0 if prompt.greedy else 1.0)
    known = (prompt_ids, output, sampling)
    return ProbeAnswer(*known, tops=tops, prompt=prompt, text=raw.text, ids_from=ids_from)


def _other_prompt(raw: RawAnswer, ids: tuple[int, ...]) -> str:
    """How the endpoint's prompt differs from ours; empty if it does not say so."""
    theirs = raw.prompt_tokens if raw.prompt_ids is None else len(raw.prompt_ids)
    if (raw.prompt_ids or ids) == ids and theirs in {None, len(ids)}:
        return ""
    return (
        f"the endpoint read a prompt of {theirs} tokens, the checkpoint's tokenizer and chat"
        f" template make {len(ids)}: it has another tokenizer or template"
    )


def _output_ids(
    raw: RawAnswer, tokens: "CheckpointTokenizer"
) -> tuple[tuple[int, ...], str] | None:
    if raw.output_ids:
        return raw.output_ids, FROM_SERVER
    if raw.alternatives:
        named = [_id_of(each.token, tokens) for each in raw.alternatives]
        ids = tuple(each for each in named if each is not None)
        if len(ids) == len(named):
            return ids, FROM_LOGS
    # The tokenizer's own ids of the text, if the endpoint counted as many.
    ids, counted = tokens.answer_ids(raw.text), raw.completion_tokens
    same = counted == len(ids) or (raw.ended and counted == len(ids) + 1)
    return (ids, FROM_TEXT) if same and tokens.text(ids) == raw.text else None


def _same_tokens(
    output: Sequence[int], alternatives: Sequence[Alternatives], tokens: "CheckpointTokenizer"
) -> bool:
    if len(output) != len(alternatives):
        return False
    named = (_id_of(each.token, tokens) for each in alternatives)
    return all(name in {None, token} for name, token in zip(named, output, strict=True))


def _top_logs(each: Alternatives, chosen: int, tokens: "CheckpointTokenizer") -> TopLogs:
    """Those whose ids are known and whose probability is told."""
    logs: dict[int, float] = {}
    for name, log in each.logs:
        token = chosen if name == each.token else _id_of(name, tokens)
        if token is not None and _LEAST_LOG < log <= 0.0:
            logs[token] = log
    return TopLogs(np.array([*logs], np.int64), np.array([*logs.values()], np.float64))


def _id_of(name: str, tokens: "CheckpointTokenizer") -> int | None:
    """None for a text that several ids stand for, or none."""
    if name.startswith(_ID_PREFIX) and name.removeprefix(_ID_PREFIX).isdecimal():
        token = int(name.removeprefix(_ID_PREFIX))
        return token if token < tokens.size else None
    return tokens.pieces.get(name)


def _score(readings: Readings, name: str, answers: Sequence[ReadAnswer]) -> float | None:
    """By how much the tokens are likelier with the suspect; None if it does not explain them."""
    greedy = [each for each in answers if each.is_greedy]
    sampled = [each for each in answers if not each.is_greedy]
    left = sum(float(each.gaps.sum()) for each in readings.by_suspect(name, greedy))
    gaps = sum(float(each.gaps.sum()) for each in greedy)
    likelier = sum(each.log_ratio for each in readings.by_suspect(name, sampled))
    if gaps > 0.0 and left > EXPLAINED_GAPS * gaps:
        return None
    tokens = sum(len(each.log_p) for each in sampled)
    surprise = surprise_of(answers) or 0.0
    if surprise * tokens - likelier >= OTHER_SURPRISE * max(1, tokens):
        return None
    return likelier + gaps - left


def surprise_of(answers: Sequence[ReadAnswer]) -> float | None:
    """That of all sampled tokens; None without any."""
    sampled = [each for each in answers if not each.is_greedy]
    tokens = sum(len(each.log_p) for each in sampled)
    total = sum(each.surprise * len(each.log_p) for each in sampled)
    return total / max(1, tokens) if sampled else None


def prompts_more(
    opinions: Sequence[Opinion], clearing: Collection[str], chances: Chances, judged_prompts: int
) -> float | None:
    """About how many more prompts lead to a verdict; None if nothing shows it yet."""
    # Both are times as many nonces as so far.
    to_clear, to_convict = 0.0, math.inf
    for each in opinions:
        if each.test in clearing and each.result is not SequentialResult.HONEST:
            log_clearing = float(each.figures.get("log_clearing", 0.0))
            missing = chances.clears_at / log_clearing - 1.0 if log_clearing > 0.0 else math.inf
            to_clear = max(to_clear, float(each.figures.get("missing", missing)))
        log_evidence = float(each.figures.get("log_evidence", 0.0))
        if log_evidence > _LIKELY:
            to_convict = min(to_convict, (chances.convicts_at + _LIKELY) / log_evidence - 1.0)
    more = judged_prompts * (to_clear if to_convict == math.inf else to_convict)
    return max(1.0, more) if 0.0 < more < _MOST else None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found, after ``asked`` prompts; None is what was not measured.

    ``suspect`` explains what was seen, None if none does, and ``cosines`` are those of the blocks
    with it. ``more`` says what an undecided probe needs. ``seen`` has the answers, what was read of
    them, and the evidence of each test.
    """

    verdict: SequentialResult
    suspect: str | None
    cosines: Sequence[float]
    more: str
    opinions: tuple[Opinion, ...]
    asked: int
    seen: "Probing"

    @property
    def ratios(self) -> Sequence[float]:
        """The errors of each block over our own rounding."""
        return self.seen.sizes.ratios if self.seen.sizes else ()

    @property
    def ratio(self) -> float | None:
        """The median of ``ratios``."""
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
            or (surprise_of(self.seen.answers) or 0.0) >= OTHER_SURPRISE
            or self.seen.greedy.share >= OTHER_SHARE
        )
        which = "another model" if far else "another model, or weights changed in no known way"
        return f"{which}{size}"


class Probing:
    """Judges answers one after the other. The methods raise EngineFault.

    ``evidence`` is that of the token test after each answer; the endpoint counted the tokens.
    """

    def __init__(
        self, tokens: "CheckpointTokenizer", reader: "CheckpointValidator", chances: Chances
    ) -> None:
        self._tokens = tokens
        self._chances = chances
        self.readings = Readings(reader)
        # The answers that were judged, and what was read of each.
        self.judged: list[ProbeAnswer] = []
        self.answers: list[ReadAnswer] = []
        self.left_out: list[LeftOut] = []
        self.evidence: list[float] = []
        self.prompt_tokens = self.output_tokens = 0
        self.greedy = GreedyJudge(self.readings)
        self._drawn = TokenJudge(self.readings, chances, all_fields=True)
        self._likelihood: LikelihoodJudge | None = None
        self.sizes: BlockJudges | None = None

    def add(self, raws: Sequence[RawAnswer | LeftOut], all_fields: bool = True) -> SequentialResult:
        """Judge a group, up to a verdict; ``all_fields``: the endpoint took all of a request."""
        known = [r if isinstance(r, LeftOut) else resolved(r, self._tokens) for r in raws]
        for each in raws:
            if isinstance(each, RawAnswer):
                self.prompt_tokens += each.prompt_tokens or 0
                self.output_tokens += each.completion_tokens or 0
        answers = [each for each in known if isinstance(each, ProbeAnswer)]
        lost = [each for each in known if isinstance(each, LeftOut)]
        self.left_out += lost
        if answers and self.sizes is None and self._likelihood is None:
            self._begin(answers, all_fields)
        for each in lost:
            if each.unsure and not each.prompt.greedy:
                self._drawn.lose()
        reads = self.readings.read(answers)
        if self._likelihood is not None:
            self._likelihood.prepare(reads)
        for answer, read in zip(answers, reads, strict=True):
            self.judged.append(answer)
            self._judge(read)
            if self._verdict in CERTAIN:
                break
        return self._verdict

    @property
    def _verdict(self) -> SequentialResult:
        found = verdict_of(self._judges)
        # Before sizes and directions are judged no other test clears alone.
        unsure = self.sizes is not None and not any(each.clears for each in self.sizes.judges)
        if found is SequentialResult.HONEST and (self._judged_few or unsure):
            return SequentialResult.UNDECIDED
        return found

    @property
    def _judged_few(self) -> bool:
        return len(self.answers) < LEAST_JUDGED * (len(self.answers) + len(self.left_out))

    @property
    def _judges(self) -> tuple[Judge[Any], ...]:
        more: Sequence[Judge[Any]] = self.sizes.judges if self.sizes is not None else ()
        if self._likelihood is not None:
            more = (self._likelihood,)
        return (self._drawn, self.greedy, *more)

    def probed(self, asked: int) -> ProbeResult:
        result = self._verdict
        opinions = tuple(judge.opinion() for judge in self._judges)
        suspect: str | None = None
        cosines: Sequence[float] = ()
        if result is SequentialResult.FRAUD and self.sizes is not None:
            suspect, cosines = self.sizes.explaining(opinions)
        elif result is SequentialResult.FRAUD:
            scores = {
                name: _score(self.readings, name, self.answers) for name in self.readings.names
            }
            known = {name: score for name, score in scores.items() if score is not None}
            suspect = max(known, key=known.__getitem__, default=None)
        return ProbeResult(result, suspect, cosines, self._more(opinions), opinions, asked, self)

    def _begin(self, answers: Sequence[ProbeAnswer], all_fields: bool) -> None:
        """Choose the tests by what the first answers have."""
        logs = any(len(top.ids) > 1 for each in answers for top in each.tops)
        tests = _WITH_LOGS if logs else _WITHOUT_LOGS
        shared = replace(self._chances, alpha=self._chances.alpha / tests)
        self._drawn = TokenJudge(self.readings, shared, all_fields)
        if logs:
            self.sizes = BlockJudges(self.readings, shared)
        else:
            self._likelihood = LikelihoodJudge(self.readings, shared)

    def _judge(self, read: ReadAnswer) -> None:
        self.answers.append(read)
        self._drawn.add(read)
        self.greedy.add(read)
        self.evidence.append(self._drawn.log_evidence)
        for judges in (self.sizes, self._likelihood):
            if judges is not None:
                judges.add(read)

    def _more(self, opinions: Sequence[Opinion]) -> str:
        if not self.answers:
            reason = f": {self.left_out[0].reason}" if self.left_out else ""
            return f"no answer can be judged{reason}"
        if self._judged_few:
            return "too many answers had to be left out"
        clearing = _LOGS_CLEAR if self.sizes is not None else _TOKENS_CLEAR
        number = prompts_more(opinions, clearing, self._chances, len(self.answers))
        if number is None:
            return "nothing yet shows how many more prompts"
        # Two digits are more than such an estimate has.
        digits = 10 ** max(0, len(str(int(number))) - 2)
        return f"about {-(-int(number + 1) // digits) * digits} more prompts"


def probe(
    endpoint: Endpoint,
    prompts: Sequence[ProbePrompt],
    probing: Probing,
    at_once: int,
    progress: Progress,
) -> ProbeResult:
    """Ask groups up to a verdict. Raises ReportedError if every route is refused, and NodeError."""
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
            raise ReportedError("; ".join(endpoint.refused.values()))
        asked += len(answers)
        progress.step(f"judging {len(answers)} answers")
        all_fields = all(each.more_fields for each in endpoint.settled.values())
        if probing.add(answers, all_fields) in CERTAIN:
            break
    return probing.probed(asked)
