"""What answers of real servers show: who read them, and who wrote them, in many orders."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np

from proofserve.reports import Progress
from proofserve.verifier.chat.answers import Answer, Blocks
from proofserve.verifier.chat.conversation import read
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.chat.writers import WRITERS as BANK
from proofserve.verifier.chat.writers import Writers, written
from proofserve.verifier.judges import Chances
from proofserve.verifier.validator import ValidatorSetup
from proofserve.verifier.verification import Truth, verify
from proofserve.verifier.written.readings import ReadAnswer, Readings, SuspectReading
from soundness.answers import folder_of
from soundness.subjects import Subject

# Orders in which the tokens of honest answers are judged, their sketches (of which a verdict takes
# half a second), and the answers of each writer.
ORDERS, ORDERS_OF_SKETCHES, ORDERS_OF_CHEATS = 10_000, 1000, 1000
# Answers of which the sketches are judged in all orders: nodes are cleared by a few.
READ_BY: Final = 48
# The two questions have half of alpha each.
CHANCES: Final = Chances(Chances().alpha / 2)
SEED: Final = "soundness"

Item = tuple[ReadAnswer, dict[str, SuspectReading]]


@dataclass(frozen=True, slots=True)
class Written:
    """Answers of one writer; ``after`` are the answers until convicted, by kind, in each order.

    None where no order of them ends so. ``gain`` is the mean evidence for the writer of a sampled
    answer, in nats; NaN for one that is not in the bank.
    """

    writer: str
    answers: int
    failures: Sequence[str]
    after: dict[str, list[int | None]]
    gain: float


@dataclass(frozen=True, slots=True)
class HonestAnswers:
    """``read_by`` counts what orders ended as, ``convicted`` those that named a cheap writer."""

    answers: int
    gaps: Sequence[str]
    failures: Sequence[str]
    read_by: dict[str, int]
    convicted: int
    lines: Sequence[str]


class AnswersTrial:
    """One published model, its validator, and the chats in its folders."""

    def __init__(self, subject: Subject, progress: Progress) -> None:
        self._arch = subject.arch
        self._progress = progress
        self._checker = ChatChecker(ValidatorSetup(subject.model.folder), None, SEED)
        validator = self._checker.validator
        self._readings = Readings(validator, [name for name in BANK if name in validator.names])

    def _answers(self, kind: str) -> tuple[tuple[Answer, ...], list[str], list[str]]:
        """The answers of a folder, what fails in them, and what is missing."""
        files = [*Path(folder_of(self._arch, kind)).glob("*.json")]
        chats = [read(file) for file in sorted(files) if file.name != "written.json"]
        known = NodeFacts(self._checker.weights_digest)
        found = self._checker.checked(chats, known)
        gaps = [f"{each.kind}: {each.text}" for each in found.gaps]
        return found.answers, [f"{each.check}: {each.text}" for each in found.failures], gaps

    def honest(self) -> HonestAnswers:
        answers, failures, gaps = self._answers("honest")
        items = self._items(answers, f"{self._arch}: honest answers")
        convicted = 0
        self._progress.step("who wrote them, in many orders", ORDERS)
        for number in range(ORDERS):
            convicted += self._judged(_shuffled(items, number)) is not None
            self._progress.advance()
        writers = Writers(self._readings, CHANCES, 0)
        for item in items:
            writers.restore(*item)
        lines = [*writers.finding().lines()]
        read_by = self._read_by(answers[:READ_BY])
        return HonestAnswers(len(items), gaps, failures, read_by, convicted, lines)

    def of_writer(self, name: str) -> Written:
        answers, failures, _ = self._answers(name)
        items = self._items(answers, f"{self._arch}: {name}")
        after: dict[str, list[int | None]] = {}
        kinds = {"sampled": False, "greedy": True}
        self._progress.step(f"{name}, in many orders", len(kinds) * ORDERS_OF_CHEATS)
        for kind, is_greedy in kinds.items():
            of = [item for item in items if item[0].is_greedy == is_greedy]
            after[kind] = []
            for number in range(ORDERS_OF_CHEATS):
                after[kind].append(self._judged(_shuffled(of, number)))
                self._progress.advance()
        sampled = [by[name].log_ratio for one, by in items if name in by and not one.is_greedy]
        gain = mean(sampled) if sampled else float("nan")
        return Written(name, len(items), failures, after, gain)

    def _items(self, answers: Sequence[Answer], title: str) -> list[Item]:
        """The answers as the published weights and those of the bank read them."""
        self._progress.step(title)
        writers = Writers(self._readings, CHANCES, 0)
        reads = writers.add([written(each, SEED) for each in answers]) + writers.compare()
        return [(each, writers.by_writers(each)) for each in reads]

    def _judged(self, items: Sequence[Item]) -> int | None:
        """After how many answers they convict; None if all of them do not."""
        writers = Writers(self._readings, CHANCES, 0)
        for number, item in enumerate(items, 1):
            writers.restore(*item)
            if writers.convicts:
                return number
        return None

    def _read_by(self, answers: Sequence[Answer]) -> dict[str, int]:
        """What the sketches say, by the answers in many orders, as ``readers`` judges them."""
        blocks = Blocks(answers, SEED)
        validator = self._checker.validator.with_other(blocks.forwards)
        ours = Truth(validator.truth, blocks.width, len(blocks), validator=validator)
        claimed, first = blocks.claims(), blocks.conversations()
        self._progress.step("who read them, in many orders", ORDERS_OF_SKETCHES)
        ended: dict[str, int] = {}
        quiet = Progress()
        for number in range(ORDERS_OF_SKETCHES):
            place = np.random.default_rng(number).permutation(len(answers))
            order = sorted(claimed.nonces, key=lambda block: (place[first[block]], block))
            judges = self._checker.sketch_judges(blocks, ours, CHANCES)
            verdict = str(verify(claimed, order, ours, judges, quiet).verdict)
            ended[verdict] = ended.get(verdict, 0) + 1
            self._progress.advance()
        return ended


def _shuffled(items: Sequence[Item], number: int) -> list[Item]:
    return [items[place] for place in np.random.default_rng(number).permutation(len(items))]


def honest_text(arch: str, found: HonestAnswers) -> str:
    """For docs/receipts.md."""
    lines = [
        f"{arch}: {found.answers} honest answers, {len(found.failures)} failures,"
        f" {len(found.gaps)} gaps; written by: {found.convicted} of {ORDERS} orders convicted;"
        f" read by: {found.read_by}",
        *found.failures[:3],
        *found.gaps[:3],
        *found.lines,
    ]
    return "\n".join(lines)


HEAD: Final = (
    "| writer | sampled answers: median, 99 % | greedy | nats a sampled answer |\n"
    "| --- | --- | --- | --- |"
)


def cheat_text(found: Written) -> str:
    """A row below ``HEAD``, and what fails in the receipts."""
    cells = [_ends(found.after[kind]) for kind in ("sampled", "greedy")]
    lines = [f"| {found.writer} | {cells[0]} | {cells[1]} | {found.gain:.4f} |"]
    return "\n".join(lines + [f"{found.writer}: {text}" for text in found.failures[:2]])


def _ends(after: Sequence[int | None]) -> str:
    ended = sorted(each for each in after if each is not None)
    share = len(ended) / len(after)
    if not ended:
        return "not convicted"
    last = str(ended[int(0.99 * len(after)) - 1]) if share >= 0.99 else "-"
    soon = sum(each <= 5 for each in ended) / len(after)
    return f"{median(ended):.0f}, {last} ({share:.1%} convicted, {soon:.0%} within 5)"
