"""Who wrote a provider's answers, by the tokens of all of them; no answer is forgotten.

The real model may read what a cheap one wrote, so sketches do not tell. What convicts is that of
``verifier.written``. A writer of the bank is ruled out as soon as the tokens would have shown it.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.judges import Chances, Judge, Opinion
from proofserve.verifier.written.judges import GreedyJudge, LikelihoodJudge, TokenJudge
from proofserve.verifier.written.readings import (
    AnyRead,
    Readings,
    SuspectReading,
    TopLogs,
    without_likely,
)

# Alternatives, with the bits of their weights: one reads each answer with each of them.
WRITERS: Final = {"int4 g128": 4, "fp8 per channel": 8, "int8 per channel": 8}
# Of each answer so many tokens in a row are read, from where the seed says.
MOST_TOKENS: Final = 128
# Making the weights of an alternative takes longer than reading a few answers with them: so they
# are read in groups, of a quarter of what was read before, and of at most so many.
AT_ONCE: Final = 8
# Tokens and likelihood ratios; the test of greedy tokens is a bound and has no alpha.
_TESTS: Final = 2
# Evidence for each answer, below which no number of answers is told.
_NO_GROWTH: Final = 1e-9
# Evidence (a natural logarithm) that shows how fast it grows.
_LIKELY: Final = 1.0


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """As ``written.readings.Written``; ``output_ids`` end with the last token that is read."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: Sampling
    first: int = 0

    @property
    def number(self) -> int:
        """Of its tokens: the same chat again is the same answer."""
        ids = np.array([*self.prompt_ids, -1, *self.output_ids], "<i8").tobytes()
        return int.from_bytes(hashlib.sha256(ids).digest()[:8], "big")

    @property
    def read(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (*self.prompt_ids, *self.output_ids[: self.first]), self.output_ids[self.first :]

    @property
    def tops(self) -> tuple[TopLogs, ...]:
        return ()


def written(answer: Answer, seed: str) -> WrittenAnswer:
    more = len(answer.output) - MOST_TOKENS
    draw = random.Random(f"{seed} {answer.output}")  # noqa: S311 - the node has signed before
    first = draw.randint(0, more) if more > 0 else 0
    return WrittenAnswer(
        answer.prompt, answer.output[: first + MOST_TOKENS], answer.sampling, first
    )


@dataclass(frozen=True, slots=True)
class WriterFinding:
    """``ruled_out`` are writers of the bank that the tokens would have shown.

    ``untested`` says of others how many answers that takes. ``enough``: all that were asked for are
    ruled out.
    """

    opinions: tuple[Opinion, ...]
    ruled_out: tuple[str, ...]
    untested: tuple[str, ...]
    enough: bool

    @property
    def convicts(self) -> bool:
        return any(each.result is SequentialResult.FRAUD for each in self.opinions)

    def lines(self) -> Iterator[str]:
        if self.ruled_out:
            yield f"written by: not by {', '.join(self.ruled_out)}"
        if self.untested:
            yield f"written by: untested against {'; '.join(self.untested)}"


class Writers:
    """Judges the tokens of one answer after the other; ``bits`` are asked to be ruled out.

    ``chances`` are those of all tests together. The methods raise EngineFault.
    """

    def __init__(self, readings: Readings, chances: Chances, bits: int) -> None:
        shared = replace(chances, alpha=chances.alpha / _TESTS)
        self._readings = readings
        self._chances = shared
        self._wanted = [name for name in readings.names if WRITERS[name] <= bits]
        self._greedy = GreedyJudge(readings)
        self._tokens = TokenJudge(readings, shared, all_fields=True)
        self._likelihood = (
            LikelihoodJudge(readings, shared, goes_on=True) if readings.names else None
        )
        self._reads: dict[int, AnyRead] = {}
        # Not yet read with the alternatives.
        self.waiting: list[AnyRead] = []

    def add(self, answers: Sequence[WrittenAnswer]) -> list[AnyRead]:
        """Read those that are new and whose tokens are free. Returns what ``compare`` does."""
        free = {a.number: a for a in answers if not a.sampling.restricted and a.output_ids}
        new = [answer for number, answer in free.items() if number not in self._reads]
        reads: list[AnyRead] = [*self._readings.read(new)] if new else []
        for read in reads:
            self.take(without_likely(read))
        self.waiting += reads
        group = min(AT_ONCE, 1 + len(self._reads) // 4)
        return self.compare() if len(self.waiting) >= group else []

    def take(self, read: AnyRead) -> None:
        self._reads[read.answer.number] = read
        self._tokens.add(read)
        self._greedy.add(read)

    def compare(self) -> list[AnyRead]:
        """Read what waits with the alternatives; these answers, of which all is known now."""
        done, self.waiting = self.waiting, []
        if self._likelihood is not None and done:
            self._likelihood.prepare(done)
            for read in done:
                self._likelihood.add(without_likely(read))
        return done

    def by_writers(self, read: AnyRead) -> dict[str, SuspectReading]:
        """What is known of an answer by the alternatives."""
        known, number = self._readings.known, read.answer.number
        return {
            name: known[name, number] for name in self._readings.names if (name, number) in known
        }

    def restore(self, read: AnyRead, by: Mapping[str, SuspectReading]) -> None:
        """Take an answer that was read before, and with alternatives."""
        for name, each in by.items():
            self._readings.known[name, read.answer.number] = each
        self.take(read)
        if self._likelihood is not None:
            self._likelihood.add(read)

    @property
    def _judges(self) -> list[Judge[AnyRead]]:
        every: tuple[Judge[AnyRead] | None, ...] = (self._tokens, self._greedy, self._likelihood)
        return [each for each in every if each is not None]

    @property
    def convicts(self) -> bool:
        return any(each.standing().convicts for each in self._judges)

    def finding(self) -> WriterFinding:
        kinds = {each.is_greedy for each in self._reads.values()}
        missing = {name: self._missing(name, kinds) for name in self._readings.names}
        untested = tuple(f"{name}: {text}" for name, text in missing.items() if text)
        gone = tuple(name for name, text in missing.items() if not text)
        enough = all(name in gone for name in self._wanted)
        opinions = tuple(each.opinion() for each in self._judges)
        return WriterFinding(opinions, gone, untested, enough)

    def _missing(self, name: str, kinds: set[bool]) -> str:
        """What rules out a writer, in answers; empty if it is ruled out in all ``kinds``."""
        parts = {"sampled": self._sampled_more(name), "greedy": self._greedy_more(name)}
        found = [
            f"{more:,.0f} more {kind} answers" if math.isfinite(more) else f"more {kind} answers"
            for kind, more in parts.items()
            if more and (kind == "greedy") in kinds
        ]
        return " and ".join(found) or "no answer" * (not kinds)

    def _sampled_more(self, name: str) -> float:
        if self._likelihood is None or not (answers := self._compared(greedy=False)):
            return math.inf
        needed, growth = self._likelihood.missing(name)
        return math.ceil(needed * answers / max(growth, _NO_GROWTH))

    def _greedy_more(self, name: str) -> float:
        """By the evidence so far, as nothing else says how fast it grows."""
        if self._likelihood is None or not (answers := self._compared(greedy=True)):
            return math.inf
        against = self._likelihood.greedy_against[name]
        needed = max(0.0, self._chances.clears_at - against)
        return math.ceil(needed * answers / against) if against > _LIKELY else math.inf

    def _compared(self, greedy: bool) -> int:
        """How many answers were read with the alternatives."""
        waiting = sum(each.is_greedy == greedy for each in self.waiting)
        return sum(each.is_greedy == greedy for each in self._reads.values()) - waiting
