"""What answers of real servers show: who read them, and who wrote them, in many orders."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np

from measuring.results import table_rows
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


HEAD: Final = ("writer", "sampled answers: median, 99 %", "greedy", "nats a sampled answer")


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

    def honest(self) -> str:
        """For docs/receipts.md: how many orders named a cheap writer, and what they ended as."""
        answers, failures, gaps = self._answers("honest")
        items = self._items(answers, f"{self._arch}: honest answers")
        orders = self._progress.over("who wrote them, in many orders", range(ORDERS))
        convicted = sum(self._judged(_shuffled(items, each)) is not None for each in orders)
        writers = Writers(self._readings, CHANCES, 0)
        for item in items:
            writers.restore(*item)
        first = (
            f"{self._arch}: {len(items)} honest answers, {len(failures)} failures,"
            f" {len(gaps)} gaps; written by: {convicted} of {ORDERS} orders convicted;"
            f" read by: {self._read_by(answers[:READ_BY])}"
        )
        return "\n".join([first, *failures[:3], *gaps[:3], *writers.finding().lines()])

    def of_writer(self, name: str) -> str:
        """A row below ``HEAD``, and what fails in the receipts."""
        answers, failures, _ = self._answers(name)
        items = self._items(answers, f"{self._arch}: {name}")
        ends = []
        for kind, is_greedy in {"sampled": False, "greedy": True}.items():
            of = [item for item in items if item[0].is_greedy == is_greedy]
            orders = self._progress.over(f"{name}, {kind}, in many orders", range(ORDERS_OF_CHEATS))
            ends.append(_ends([self._judged(_shuffled(of, each)) for each in orders]))
        sampled = [by[name].log_ratio for one, by in items if name in by and not one.is_greedy]
        # NaN for a writer that is not in the bank.
        gain = mean(sampled) if sampled else float("nan")
        row = table_rows([(name, *ends, f"{gain:.4f}")])
        return "\n".join([row, *(f"{name}: {text}" for text in failures[:2])])

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
        ended, quiet = Counter[str](), Progress()
        orders = range(ORDERS_OF_SKETCHES)
        for number in self._progress.over("who read them, in many orders", orders):
            place = np.random.default_rng(number).permutation(len(answers))
            order = sorted(claimed.nonces, key=lambda block: (place[first[block]], block))
            judges = self._checker.sketch_judges(blocks, ours, CHANCES)
            ended[str(verify(claimed, order, ours, judges, quiet).verdict)] += 1
        return dict(ended)


def _shuffled(items: Sequence[Item], number: int) -> list[Item]:
    return [items[place] for place in np.random.default_rng(number).permutation(len(items))]


def _ends(after: Sequence[int | None]) -> str:
    ended = sorted(each for each in after if each is not None)
    share = len(ended) / len(after)
    if not ended:
        return "not convicted"
    last = str(ended[int(0.99 * len(after)) - 1]) if share >= 0.99 else "-"
    soon = sum(each <= 5 for each in ended) / len(after)
    return f"{median(ended):.0f}, {last} ({share:.1%} convicted, {soon:.0%} within 5)"
