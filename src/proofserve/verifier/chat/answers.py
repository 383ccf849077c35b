"""Answers whose receipts are checked: blocks of their tokens, and the test of the tokens alone.

The errors of neighbouring tokens are alike, and one token says little. A block of 16 says about as
much as a nonce of ``sketch-v1``, so the same tests judge both.

The token test asks whether a model that samples as stated wrote the answers. An honest server
rounds, near a tie between experts by much. So what convicts by the published model alone is
computed again with every emulated kernel, and only what none of them explains counts.
"""

import base64
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proofserve.lab.report import Progress
from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sampled import log_probabilities, penalised, shortfall
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches
from proofserve.protocol.verdict.chosen_tokens import (
    TILTS,
    TokenEvidence,
    greedy_gap,
    kernel_log_means,
    moved_apart,
)
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.evidence import RareEvidence
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.rounds.records import ProofBatch
from proofserve.verifier.calibration_file import GreedyLimit
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import Chances, Opinion, evidence_text

if TYPE_CHECKING:
    from proofserve.engines.reference.engine import Run
    from proofserve.verifier.validator import CheckpointValidator

BLOCK_TOKENS = 16
# Blocks of one answer that count: answers of a calibration have as many, and only so many of one
# conversation are known to be independent enough.
MOST_BLOCKS = 8
TOKENS_TEST = "tokens"
# Logits of so many tokens are in memory at a time, for a vocabulary that may have 200,000.
TOKENS_AT_ONCE = 32
# A server's rounding may keep a token that ours excludes, if its logit is nearly the least kept:
# by so much, and by so many times what any emulated kernel moves the two likeliest apart at most.
EXCLUDED_ROOM, MOVED_ROOM = 0.5, 3.0
# The shares of a greedy answer's tokens that a cheap writer may choose otherwise.
OTHER_SHARES = (0.5, 0.1, 0.02)
# The limit of a greedy gap: above the largest seen, and taken to be passed by as many tokens as
# none in n tokens still leaves likely.
GAP_ROOM, LEAST_GAP, PASSED = 1.5, 0.01, 5.0
LEAST_GREEDY_TOKENS = 500

Logits = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """``prompt`` and ``output`` are token ids, ``sketches`` float32 [len(output), k_dim]."""

    name: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    sampling: Sampling
    scheme: ReceiptScheme
    sketches: NDArray[np.float32]


class Blocks:
    """Blocks of ``BLOCK_TOKENS`` tokens of ``answers``, numbered from 0; a block may have two.

    Of an answer longer than ``MOST_BLOCKS`` blocks, pieces of a block's length count, which
    ``seed`` chooses: its node could not know them. The last tokens that fill no block are left out.
    """

    def __init__(self, answers: Sequence[Answer], seed: str) -> None:
        self.answers = tuple(answers)
        self.k_dim = answers[0].sketches.shape[1] if answers else 0
        draw = random.Random(seed)  # noqa: S311 - the node has signed its sketches before
        rows = [
            (index, token)
            for index, answer in enumerate(answers)
            for token in _chosen(len(answer.output), draw)
        ]
        count = len(rows) // BLOCK_TOKENS
        places = np.array(rows, dtype=np.int64).reshape(-1, 2)[: count * BLOCK_TOKENS]
        self._places = places.reshape(count, BLOCK_TOKENS, 2)
        self._rows: dict[ReceiptScheme, Tensor] = {}
        # Values of a block's vector: the sketches of its tokens, one after the other.
        self.width = BLOCK_TOKENS * self.k_dim

    def __len__(self) -> int:
        return len(self._places)

    def answers_of(self, blocks: Collection[int]) -> list[int]:
        """The indices of the answers that have tokens in ``blocks``."""
        found: list[int] = np.unique(self._places[list(blocks), :, 0]).tolist()
        return found

    def within(self, answers: Collection[int]) -> list[int]:
        """The blocks all of whose tokens are of ``answers``."""
        inside = np.isin(self._places[:, :, 0], list(answers)).all(axis=1)
        found: list[int] = np.flatnonzero(inside).tolist()
        return found

    def vectors(
        self, sketches: Mapping[int, NDArray[np.float32]], blocks: Sequence[int]
    ) -> NDArray[np.float32]:
        """float32 [len(blocks), width] of ``sketches``, those of each answer by its index."""
        made = np.empty((len(blocks), BLOCK_TOKENS, self.k_dim), np.float32)
        for row, block in enumerate(blocks):
            for column, (answer, token) in enumerate(self._places[block].tolist()):
                made[row, column] = sketches[answer][token]
        return made.reshape(len(blocks), self.width)

    def claims(self) -> ClaimedArtifacts:
        """What the receipts claim, in the form in which proofs are verified."""
        numbers = range(len(self))
        theirs = {index: answer.sketches for index, answer in enumerate(self.answers)}
        vectors = to_float16(self.vectors(theirs, numbers))
        texts = (base64.b64encode(vector.tobytes()).decode("ascii") for vector in vectors)
        claims = tuple(Claim(n, text) for n, text in zip(numbers, texts, strict=True))
        return ClaimedArtifacts("", "", tuple(numbers), claims, width=self.width)

    def conversations(self) -> dict[int, int]:
        """The index of the answer that each block begins in."""
        return dict(enumerate(self._places[:, 0, 0].tolist()))

    def by_server(self) -> dict[str, list[int]]:
        """The blocks of each server by its sketch key; every start of a server has its own."""
        found: dict[str, list[int]] = {}
        for block, answer in self.conversations().items():
            found.setdefault(self.answers[answer].scheme.key, []).append(block)
        return found

    def forwards(self, runs: "Sequence[Run]") -> list[ProofBatch]:
        """The answers' sketches by block; those of an answer come together. Raises EngineFault."""
        batches = []
        for run in runs:
            needed = self.answers_of(run.nonces)
            found = {index: self._sketches(run, self.answers[index]) for index in needed}
            computed = np.array(self.within(needed), np.int64)
            vectors = self.vectors(found, computed.tolist())
            finite = np.isfinite(vectors).all(axis=1)
            good, failed = (tuple(computed[each].tolist()) for each in (finite, ~finite))
            batches.append(ProofBatch(good, vectors[finite], failed))
        return batches

    def _sketches(self, run: "Run", answer: Answer) -> NDArray[np.float32]:
        scheme, network = answer.scheme, run.network
        if scheme not in self._rows:
            self._rows[scheme] = scheme.rows(network.facts.hidden_size, network.device)
        # This import takes seconds, and --help needs none of it.
        from proofserve.engines.reference.reading import states_of  # noqa: PLC0415

        (states,) = states_of(network, [(answer.prompt, answer.output)], run.experts)
        made: NDArray[np.float32] = sketches(states, self._rows[scheme]).cpu().numpy()
        return made


def _chosen(tokens: int, draw: random.Random) -> list[int]:
    whole = tokens // BLOCK_TOKENS
    if whole <= MOST_BLOCKS:
        return list(range(tokens))
    pieces = sorted(draw.sample(range(whole), MOST_BLOCKS))
    return [piece * BLOCK_TOKENS + i for piece in pieces for i in range(BLOCK_TOKENS)]


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
    answer: Answer, reader: "CheckpointValidator", kernels: Sequence[str]
) -> Iterator[AnswerPart]:
    """``TOKENS_AT_ONCE`` tokens after the other. Raises EngineFault."""
    states = {name: reader.states(answer.prompt, answer.output, name) for name in (None, *kernels)}

    def made(first: int, kernel: str | None) -> Logits:
        logits = reader.logits(states[kernel][first : first + TOKENS_AT_ONCE], kernel)
        return penalised(
            logits.astype(np.float64), answer.sampling, answer.prompt, answer.output, first
        )

    for first in range(0, len(answer.output), TOKENS_AT_ONCE):
        yield AnswerPart(answer, first, made(first, None), map(partial(made, first), kernels))


def judge_tokens(
    answers: Sequence[Answer],
    reader: "CheckpointValidator",
    greedy: GreedyLimit | None,
    chances: Chances,
    progress: Progress,
) -> Opinion:
    """What the tokens of ``answers`` say; it can convict and not clear.

    Without ``greedy``, which a calibration has, greedy answers are not tested, nor are those whose
    request restricted tokens. Raises EngineFault if a forward fails.
    """
    free = [each for each in answers if not each.sampling.restricted]
    tested = [each for each in free if greedy or each.sampling.temperature > 0.0]
    if not tested:
        text = "not tested: no answer whose tokens were drawn by the stated parameters alone"
        return Opinion(TOKENS_TEST, SequentialResult.UNDECIDED, 0, text, {})
    progress.step(f"reading the tokens of {len(tested)} answers", len(tested))
    found = _TokenTest(reader, greedy, chances, ()).reads(tested, progress)
    if found.result is SequentialResult.FRAUD and reader.kernels:
        emulated = f"{len(reader.kernels)} emulated kernels"
        progress.step(f"reading the tokens again by {emulated}", len(tested))
        return _TokenTest(reader, greedy, chances, reader.kernels).reads(tested, progress)
    return found


def greedy_limit(
    answers: Sequence[Answer],
    read: Sequence[Answer],
    reader: "CheckpointValidator",
    progress: Progress,
) -> GreedyLimit | None:
    """By honest servers' greedy answers, and what kernels choose in ``read``; None if too few."""
    greedy = [a for a in answers if a.sampling.temperature == 0.0 and not a.sampling.restricted]
    parts = (part for answer in greedy for part in answer_parts(answer, reader, ()))
    chosen = np.array([gap for part in parts for gap in greedy_gap(part.logits, part.tokens)])
    if len(chosen) < LEAST_GREEDY_TOKENS:
        return None
    progress.step(f"greedy tokens of {len(reader.kernels)} emulated kernels", len(read))
    largest, tokens = float(chosen.max()), 0
    for answer in read:
        for part in answer_parts(answer, reader, reader.kernels):
            tokens += len(part.logits)
            for logits in part.of_kernels:
                gaps = greedy_gap(part.logits, logits.argmax(axis=1))
                largest = max(largest, float(gaps.max()))
        progress.advance()
    least = min(len(chosen), tokens) if reader.kernels else len(chosen)
    return GreedyLimit(gap=max(GAP_ROOM * largest, LEAST_GAP), rate=PASSED / least)


class _TokenTest:
    """Sampled and greedy answers each have half of alpha, if both can be tested.

    The limit of greedy tokens is one of all kernels of the calibration, so it needs no ``kernels``.
    """

    def __init__(
        self,
        reader: "CheckpointValidator",
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
            self._chosen.add_cases(greedy_gap(part.logits, tokens) > self._greedy.gap)
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
        self._sampled.read(log_p, tokens, most)
        return None

    def _opinion(self, result: SequentialResult, text: str) -> Opinion:
        return Opinion(TOKENS_TEST, result, self._tokens, text, {"log_evidence": self._log})
