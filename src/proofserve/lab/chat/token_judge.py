"""The token test over answers: who wrote them, a model that samples as stated or another one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.chat.answers import Answer
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Chances, Finding, evidence_text, finding_of
from proofserve.protocol.receipts.sampled import log_probabilities, penalised, shortfall
from proofserve.protocol.verdict.chosen_tokens import GreedyEvidence, TokenEvidence, greedy_gap
from proofserve.protocol.verdict.sequential import SequentialResult

NAME = "tokens"
# Logits of so many tokens are in memory at a time, for a vocabulary that may have 200,000.
AT_ONCE = 32
# A server's rounding may keep a token that ours excludes, if its logit is nearly the least kept.
EXCLUDED_ROOM = 0.5

Logits = NDArray[np.float64]


class TokenReader(Protocol):
    """The published model as a validator runs it."""

    def states(self, answer: Answer) -> NDArray[np.float32]:
        """The states [tokens, hidden] behind the tokens. Raises EngineFault."""

    def logits(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, vocabulary] of ``states`` [n, hidden]."""


@dataclass(frozen=True, slots=True)
class GreedyLimit:
    """The gap to the largest logit that at most a share ``rate`` of honest greedy tokens exceed."""

    gap: float
    rate: float


def judge_tokens(
    answers: Sequence[Answer],
    reader: TokenReader,
    greedy: GreedyLimit | None,
    chances: Chances,
    progress: Progress,
) -> Finding:
    """What the tokens of ``answers`` say; it can convict and not clear.

    Without ``greedy``, which a calibration has, greedy answers are not tested, nor are those whose
    request restricted tokens. Raises EngineFault if a forward fails.
    """
    tested = [answer for answer in answers if _can_be_tested(answer, greedy)]
    if not tested:
        text = "not tested: no answer whose tokens were drawn by the stated parameters alone"
        return Finding(NAME, SequentialResult.UNDECIDED, 0, text, {})
    progress.step(f"reading the tokens of {len(tested)} answers", len(tested))
    judge = _TokenJudge(reader, greedy, chances)
    for answer in tested:
        if found := judge.reads(answer):
            return found
        progress.advance()
    return finding_of(NAME, judge.log, False, judge.chances, judge.tokens)


def _can_be_tested(answer: Answer, greedy: GreedyLimit | None) -> bool:
    sampling = answer.sampling
    return not sampling.restricted and (sampling.temperature > 0.0 or greedy is not None)


class _TokenJudge:
    """Sampled and greedy answers each have half of alpha, if both can be tested."""

    def __init__(self, reader: TokenReader, greedy: GreedyLimit | None, chances: Chances) -> None:
        shares = 2.0 if greedy else 1.0
        self.chances = Chances(chances.alpha / shares, chances.beta)
        self.tokens = 0
        self._reader = reader
        self._greedy = greedy
        self._sampled = TokenEvidence()
        self._chosen = GreedyEvidence(greedy.rate) if greedy else None

    @property
    def log(self) -> float:
        return max(self._sampled.log, self._chosen.log if self._chosen else 0.0)

    def reads(self, answer: Answer) -> Finding | None:
        """The finding as soon as the tokens up to there convict."""
        for first, logits in self._parts(answer):
            tokens = np.array(answer.output[first : first + len(logits)])
            self.tokens += len(tokens)
            last = f"token {first + len(tokens)} of {answer.name}"
            if answer.sampling.temperature > 0.0:
                if refused := self._refused(answer, logits, tokens, first):
                    return refused
            elif self._chosen and self._greedy:
                self._chosen.add(greedy_gap(logits, tokens) > self._greedy.gap)
            if self.log >= self.chances.convicts_at:
                text = f"another model wrote the answers, {evidence_text(self.log)} by {last}"
                return self._fraud(text)
        return None

    def _refused(
        self, answer: Answer, logits: Logits, tokens: NDArray[np.int64], first: int
    ) -> Finding | None:
        log_p = log_probabilities(logits, answer.sampling)
        short = shortfall(logits, log_p, tokens)
        for place in np.flatnonzero(short > EXCLUDED_ROOM):
            where = f"token {first + place} of {answer.name}"
            far = f"its logit is {short[place]:.2f} below the least one kept"
            return self._fraud(f"{where} cannot have been drawn as stated: {far}")
        self._sampled.add(log_p, tokens)
        return None

    def _parts(self, answer: Answer) -> Iterator[tuple[int, Logits]]:
        states = self._reader.states(answer)
        for first in range(0, len(answer.output), AT_ONCE):
            logits = self._reader.logits(states[first : first + AT_ONCE]).astype(np.float64)
            made = penalised(logits, answer.sampling, answer.prompt, answer.output, first)
            yield first, made

    def _fraud(self, text: str) -> Finding:
        figures = {"log_evidence": self.log}
        return Finding(NAME, SequentialResult.FRAUD, self.tokens, text, figures)
