"""The token test over answers: who wrote them, a model that samples as stated or another one.

An honest server rounds, near a tie between experts by much, and draws from what that leaves. So
what convicts by the published model alone is computed again with every kernel that the validator
emulates, and only what none of them explains counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.report import Progress
from proofserve.protocol.receipts.sampled import log_probabilities, penalised, shortfall
from proofserve.protocol.verdict.chosen_tokens import (
    TILTS,
    TokenEvidence,
    greedy_gap,
    kernel_log_means,
    moved_apart,
)
from proofserve.protocol.verdict.evidence import RareEvidence
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.calibration_file import GreedyLimit
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.judges import Chances, Opinion, evidence_text

if TYPE_CHECKING:
    from proofserve.verifier.chat.validator import ChatValidator

NAME = "tokens"
# Logits of so many tokens are in memory at a time, for a vocabulary that may have 200,000.
AT_ONCE = 32
# A server's rounding may keep a token that ours excludes, if its logit is nearly the least kept:
# by so much, and by so many times what any emulated kernel moves the two likeliest apart at most.
EXCLUDED_ROOM, MOVED_ROOM = 0.5, 3.0
# The shares of a greedy answer's tokens that a cheap writer may choose otherwise.
OTHER_SHARES = (0.5, 0.1, 0.02)

Logits = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Some tokens of an answer from ``first`` on: ``logits`` [n, vocabulary] that chose them.

    ``of_kernels`` makes those of each emulated kernel, one after the other, because together they
    would take much memory. Penalties have been taken off all of them.
    """

    answer: Answer
    first: int
    logits: Logits
    of_kernels: Iterator[Logits]

    @property
    def tokens(self) -> NDArray[np.int64]:
        return np.array(self.answer.output[self.first : self.first + len(self.logits)])


def answer_parts(
    answer: Answer, reader: "ChatValidator", kernels: Sequence[str]
) -> Iterator[AnswerPart]:
    """``AT_ONCE`` tokens after the other. Raises EngineFault."""
    states = {name: reader.states(answer, name) for name in (None, *kernels)}

    def made(first: int, kernel: str | None) -> Logits:
        logits = reader.logits(states[kernel][first : first + AT_ONCE], kernel)
        return penalised(
            logits.astype(np.float64), answer.sampling, answer.prompt, answer.output, first
        )

    for first in range(0, len(answer.output), AT_ONCE):
        yield AnswerPart(answer, first, made(first, None), map(partial(made, first), kernels))


def judge_tokens(
    answers: Sequence[Answer],
    reader: "ChatValidator",
    greedy: GreedyLimit | None,
    chances: Chances,
    progress: Progress,
) -> Opinion:
    """What the tokens of ``answers`` say; it can convict and not clear.

    Without ``greedy``, which a calibration has, greedy answers are not tested, nor are those whose
    request restricted tokens. Raises EngineFault if a forward fails.
    """
    tested = [answer for answer in answers if _can_be_tested(answer, greedy)]
    if not tested:
        text = "not tested: no answer whose tokens were drawn by the stated parameters alone"
        return Opinion(NAME, SequentialResult.UNDECIDED, 0, text, {})
    progress.step(f"reading the tokens of {len(tested)} answers", len(tested))
    found = _TokenTest(reader, greedy, chances, ()).reads(tested, progress)
    if found.result is SequentialResult.FRAUD and reader.kernels:
        emulated = f"{len(reader.kernels)} emulated kernels"
        progress.step(f"reading the tokens again by {emulated}", len(tested))
        return _TokenTest(reader, greedy, chances, reader.kernels).reads(tested, progress)
    return found


def _can_be_tested(answer: Answer, greedy: GreedyLimit | None) -> bool:
    sampling = answer.sampling
    return not sampling.restricted and (sampling.temperature > 0.0 or greedy is not None)


class _TokenTest:
    """Sampled and greedy answers each have half of alpha, if both can be tested.

    The limit of greedy tokens is one of all kernels of the calibration, so it needs no ``kernels``.
    """

    def __init__(
        self,
        reader: "ChatValidator",
        greedy: GreedyLimit | None,
        chances: Chances,
        kernels: Sequence[str],
    ) -> None:
        shares = 2.0 if greedy else 1.0
        self._limit = Chances(chances.alpha / shares, chances.beta).convicts_at
        self._reader = reader
        self._kernels = kernels
        self._greedy = greedy
        self._sampled = TokenEvidence()
        self._chosen = RareEvidence(greedy.rate, OTHER_SHARES) if greedy else None
        self._tokens = 0
        self._moved = 0.0

    def reads(self, answers: Sequence[Answer], progress: Progress) -> Opinion:
        """What ``answers`` say, or as many of them as convict."""
        for answer in answers:
            sampled = answer.sampling.temperature > 0.0
            for part in answer_parts(answer, self._reader, self._kernels if sampled else ()):
                if fraud := self._reads(part):
                    return self._opinion(SequentialResult.FRAUD, fraud)
            progress.advance()
        return self._opinion(SequentialResult.UNDECIDED, evidence_text(self._log))

    @property
    def _log(self) -> float:
        return max(self._sampled.log, self._chosen.log if self._chosen else 0.0)

    def _reads(self, part: AnswerPart) -> str | None:
        """Why the tokens up to there convict, if they do."""
        answer, tokens = part.answer, part.tokens
        self._tokens += len(tokens)
        if answer.sampling.temperature > 0.0:
            if refused := self._refused(part):
                return refused
        elif self._chosen and self._greedy:
            self._chosen.add(greedy_gap(part.logits, tokens) > self._greedy.gap)
        if self._log < self._limit:
            return None
        last = f"token {part.first + len(tokens)} of {answer.name}"
        return f"another model wrote the answers, {evidence_text(self._log)} by {last}"

    def _refused(self, part: AnswerPart) -> str | None:
        """Weighs sampled tokens; says which of them cannot have been drawn, if one cannot."""
        answer, tokens = part.answer, part.tokens
        log_p = log_probabilities(part.logits, answer.sampling)
        most = np.zeros(len(TILTS))
        for logits in part.of_kernels:
            self._moved = max(self._moved, float(moved_apart(part.logits, logits).max()))
            means = kernel_log_means(log_p, log_probabilities(logits, answer.sampling))
            most = np.maximum(most, means.sum(axis=0))
        short = shortfall(part.logits, log_p, tokens)
        for place in np.flatnonzero(short > EXCLUDED_ROOM + MOVED_ROOM * self._moved):
            where = f"token {part.first + place} of {answer.name}"
            far = f"its logit is {short[place]:.2f} below the least one kept"
            return f"{where} cannot have been drawn as stated: {far}"
        self._sampled.add(log_p, tokens, most)
        return None

    def _opinion(self, result: SequentialResult, text: str) -> Opinion:
        return Opinion(NAME, result, self._tokens, text, {"log_evidence": self._log})
