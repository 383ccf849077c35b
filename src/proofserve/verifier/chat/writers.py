"""Who wrote a provider's answers, by the tokens of all of them; no answer is forgotten.

The real model may read what a cheap one wrote, so sketches do not tell. What convicts is that of
``verifier.written``. A writer of the bank is ruled out as soon as the tokens would have shown it.
"""

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from proofserve.engines.reference.suspects import SKIPPED
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.chat.answers import Answer
from proofserve.verifier.judges import Chances, Judge, Opinion
from proofserve.verifier.written.judges import GreedyJudge, LikelihoodJudge, TokenJudge
from proofserve.verifier.written.readings import (
    ReadAnswer,
    Readings,
    SuspectReading,
    WrittenAnswer,
    without_likely,
)

# Alternatives, with the bits of their weights: one reads each answer with each of them.
WRITERS: Final = {SKIPPED: 16, "int4 g128": 4, "fp8 per channel": 8, "int8 per channel": 8}
# Of each answer so many tokens in a row are read, from where the seed says.
MOST_TOKENS: Final = 128
# Making the weights of an alternative takes longer than reading a few answers with them: so they
# are read in groups, of a quarter of what was read before, and of at most so many.
AT_ONCE: Final = 8
# Tokens and likelihood ratios; the test of greedy tokens is a bound and has no alpha.
_TESTS: Final = 2


def writers_of(suspects: Collection[str]) -> list[str]:
    """The alternatives to a checkpoint with these ``suspects``: what is cheaper than it is."""
    return [name for name in WRITERS if name == SKIPPED or name in suspects]


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
        self._wanted = [name for name in readings.names if WRITERS[name] <= bits]
        self._greedy = GreedyJudge(readings)
        self._tokens = TokenJudge(readings, shared, all_fields=True)
        self._judges: list[Judge[ReadAnswer]] = [self._tokens, self._greedy]
        self._likelihood: LikelihoodJudge | None = None
        if readings.names:
            self._likelihood = LikelihoodJudge(readings, shared, goes_on=True)
            self._judges.append(self._likelihood)
        self._reads: dict[int, ReadAnswer] = {}
        # Not yet read with the alternatives.
        self.waiting: list[ReadAnswer] = []

    def add(self, answers: Sequence[WrittenAnswer]) -> list[ReadAnswer]:
        """Read those that are new and whose tokens are free. Returns what ``compare`` does."""
        free = {a.number: a for a in answers if not a.sampling.restricted and a.output_ids}
        new = [answer for number, answer in free.items() if number not in self._reads]
        reads: list[ReadAnswer] = [*self._readings.read(new)] if new else []
        for read in reads:
            self.take(without_likely(read))
        self.waiting += reads
        group = min(AT_ONCE, 1 + len(self._reads) // 4)
        return self.compare() if len(self.waiting) >= group else []

    def take(self, read: ReadAnswer) -> None:
        self._reads[read.answer.number] = read
        self._tokens.add(read)
        self._greedy.add(read)

    def compare(self) -> list[ReadAnswer]:
        """Read what waits with the alternatives; these answers, of which all is known now."""
        done, self.waiting = self.waiting, []
        if self._likelihood is not None and done:
            self._likelihood.prepare(done)
            for read in done:
                self._likelihood.add(without_likely(read))
        return done

    def by_writers(self, read: ReadAnswer) -> dict[str, SuspectReading]:
        """What is known of an answer by the alternatives."""
        known, number = self._readings.known, read.answer.number
        return {
            name: known[name, number] for name in self._readings.names if (name, number) in known
        }

    def restore(self, read: ReadAnswer, by: Mapping[str, SuspectReading]) -> None:
        """Take an answer that was read before, and with alternatives."""
        for name, each in by.items():
            self._readings.known[name, read.answer.number] = each
        self.take(read)
        if self._likelihood is not None:
            self._likelihood.add(read)

    @property
    def convicts(self) -> bool:
        return any(each.result() is SequentialResult.FRAUD for each in self._judges)

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
        found = []
        for is_greedy, kind in ((False, "sampled"), (True, "greedy")):
            more = self._likelihood.answers_more(name, is_greedy) if self._likelihood else math.inf
            if more and is_greedy in kinds:
                number = f"{more:,.0f} " if math.isfinite(more) else ""
                found.append(f"{number}more {kind} answers")
        return " and ".join(found) or "no answer" * (not kinds)
