"""The verdict over chat answers, by receipts, sketches and tokens, and what it calls honest."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from typing_extensions import TypedDict

from proofserve.protocol.receipts.record import SCHEME
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import vectors_of
from proofserve.reports import FieldsOf, Progress, ReportedError
from proofserve.verifier.calibration_file import CalibrationFile, KernelFacts, checkpoint_shape
from proofserve.verifier.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.statements import (
    MOST_GAPS,
    CheckedChats,
    FailedCheck,
    Gap,
    GapKind,
    NodeFacts,
    checked_answers,
    leave_open,
)
from proofserve.verifier.chat.writers import WriterFinding, Writers, writers_of, written
from proofserve.verifier.judges import Chances, Judge, Opinion, OpinionRecord
from proofserve.verifier.judging import JudgingOptions, judges_of, orders_by
from proofserve.verifier.noise import (
    MeasuringPlan,
    honest_runs,
    left_out_lines,
    measured_calibration,
)
from proofserve.verifier.populations import nearest
from proofserve.verifier.verification import Truth, Verification, verify
from proofserve.verifier.written.readings import Readings

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup

# Blocks that are recomputed in one call: those of a few conversations.
AT_ONCE = 32
# What an answer keeps less of in all of its blocks is not cleared. More, as of nonces, would take
# twice as many answers, of which a client has few.
_KEPT: Final = 0.8
WHAT_TO_MEASURE: Final = (
    "No verdict: no honest kernel that is known explains these errors, and no fraud that is known."
    " If a server of this kind is trusted, measure it: proofserve calibrate chat MODEL --url URL"
    " --out FILE"
)
READ_BY: Final = {
    SequentialResult.HONEST: "these weights",
    SequentialResult.FRAUD: "others, or not as the receipts say",
    SequentialResult.UNDECIDED: "too few tokens to tell",
    SequentialResult.UNEXPLAINED: "no honest kernel that is known, and no fraud that is known",
}
# Blocks that every emulated kernel computes, and those of each server on which suspects are
# measured. They are those of whole conversations, whose blocks are alike.
EMULATED_BLOCKS, BANK_BLOCKS = 256, 128
NO_CALIBRATION = "none; kernels were emulated on the same answers"


class ChatRecord(TypedDict):
    """What ``verify-chat --json`` writes: ``ChatVerification`` as JSON."""

    verdict: SequentialResult
    choices: int
    answers: int
    gaps: list[Annotated[dict[str, Any], FieldsOf(Gap)]]
    notes: list[str]
    read_by: SequentialResult
    written_by: Annotated[dict[str, Any], FieldsOf(WriterFinding)] | None
    failures: list[Annotated[dict[str, Any], FieldsOf(FailedCheck)]]
    findings: list[OpinionRecord]
    figures_from: str
    seed: str


@dataclass(frozen=True, slots=True)
class ChatVerification(CheckedChats):
    """``sketches`` say who read the answers; None if these together have no whole block of tokens.

    ``writer`` says who wrote them. Beyond a share of ``most_gaps`` no node is cleared. ``notes``
    are for a reader. ``origin`` says where the honest figures come from, and ``seed`` chose parts
    of long answers.
    """

    sketches: Verification | None = None
    writer: WriterFinding | None = None
    notes: tuple[str, ...] = ()
    most_gaps: float = MOST_GAPS
    origin: str = NO_CALIBRATION
    seed: str = ""

    @property
    def verdict(self) -> SequentialResult:
        """One failure is enough to convict; a node that owes too much is not cleared."""
        found = self.of_answers
        owes = found is not SequentialResult.FRAUD and self.unproved
        return SequentialResult.UNPROVED if owes else found

    @property
    def of_answers(self) -> SequentialResult:
        """By those that were checked alone; only their sketches can clear."""
        writer = self.writer
        if writer is not None and writer.convicts:
            return SequentialResult.FRAUD
        cleared = self.read_by is SequentialResult.HONEST
        untested = cleared and writer is not None and not writer.enough
        return SequentialResult.UNDECIDED if untested else self.read_by

    @property
    def read_by(self) -> SequentialResult:
        """Whether the published weights read the answers."""
        sketches = self.sketches.verdict if self.sketches else SequentialResult.UNDECIDED
        return SequentialResult.FRAUD if self.failures else sketches

    @property
    def counts(self) -> Counter[GapKind]:
        return Counter(gap.kind for gap in self.gaps)

    @property
    def unproved(self) -> str:
        return leave_open(self.counts, self.choices, self.most_gaps)

    @property
    def opinions(self) -> tuple[Opinion, ...]:
        of_sketches = self.sketches.opinions if self.sketches else ()
        return (*of_sketches, *self.writer.opinions) if self.writer else of_sketches

    def lines(self) -> Iterator[str]:
        yield f"{len(self.answers)} answers with a receipt checked (seed {self.seed})"
        if unproved := self.unproved:
            yield f"  unproved: {unproved}"
        for failure in self.failures:
            yield f"  {failure.check:9} fraud: {failure.text}"
        for opinion in self.opinions:
            yield f"  {opinion.test:10} {opinion.result}: {opinion.text}"
        yield f"read by: {READ_BY[self.read_by]}"
        yield from self.writer.lines() if self.writer else ()
        for gap in self.gaps:
            yield f"  {gap.kind}: {gap.text}"
        for note in self.notes:
            yield f"  {note}"
        if self.verdict is SequentialResult.UNDECIDED:
            yield "More answers are needed: give several files."
        if self.verdict is SequentialResult.UNEXPLAINED:
            yield WHAT_TO_MEASURE
        yield f"Honest figures: {self.origin}."

    def record(self) -> ChatRecord:
        return {
            "verdict": self.verdict,
            "choices": self.choices,
            "answers": len(self.answers),
            "gaps": [asdict(each) for each in self.gaps],
            "notes": list(self.notes),
            "read_by": self.read_by,
            "written_by": asdict(self.writer) if self.writer else None,
            "failures": [asdict(each) for each in self.failures],
            "findings": [asdict(each) for each in self.opinions],
            "figures_from": self.origin,
            "seed": self.seed,
        }


class ChatChecker:
    """Honest servers serve as ``measured``, or else ``setup``, says.

    ``seed`` chooses the compared parts of long answers: a node must not know it beforehand.
    ``most_gaps`` is the largest share of answers that may show nothing. Raises ReportedError and
    CheckpointError if the checkpoint or the calibration cannot be used.
    """

    def __init__(
        self,
        setup: "ValidatorSetup",
        measured: CalibrationFile | None,
        seed: str,
        most_gaps: float = MOST_GAPS,
    ) -> None:
        # This imports transformers, which takes seconds.
        from proofserve.verifier.validator import CheckpointTokenizer, CheckpointValidator  # noqa: PLC0415

        self._setup = setup
        self._measured = measured
        self._seed = seed
        self._most_gaps = most_gaps
        self._tokenizer = CheckpointTokenizer(setup.model)
        self.validator = CheckpointValidator(setup.serving_as(measured), of_chat=True)
        if (digest := self.validator.weights_digest) is None:
            raise ReportedError(f"{setup.model}: its weights have no digest: no safetensors files")
        self.weights_digest = digest

    def writers(self, chances: Chances, bits: int = 0) -> Writers:
        """A test of who writes answers, with ``chances``; ``bits`` are asked to be ruled out."""
        return Writers(Readings(self.validator, writers_of(self.validator.names)), chances, bits)

    def outcome(
        self,
        chats: Sequence[Conversation],
        known: NodeFacts,
        chances: Chances,
        progress: Progress,
        bits: int = 0,
    ) -> ChatVerification:
        """The verdict over all ``chats``; writers of ``bits`` have to be ruled out, too.

        Sketches and tokens each have half of alpha. Raises EngineFault if a forward fails.
        """
        half = replace(chances, alpha=chances.alpha / 2)
        found = self.readers(chats, known, half, progress)
        if found.failures or not found.answers:
            return found
        progress.step(f"reading the tokens of {len(found.answers)} answers")
        writers = self.writers(half, bits)
        writers.add([written(each, self._seed) for each in found.answers])
        writers.compare()
        return replace(found, writer=writers.finding())

    def readers(
        self, chats: Sequence[Conversation], known: NodeFacts, chances: Chances, progress: Progress
    ) -> ChatVerification:
        """Who read the answers of all ``chats``.

        Raises EngineFault if a forward fails, and ReportedError if our own recomputation is not
        complete.
        """
        checked, measured = self.checked(chats, known), self._measured
        answers, repeated = distinct(checked.answers)
        found = ChatVerification(
            *(answers, checked.failures, checked.gaps, checked.choices),
            notes=tuple(repeated),
            most_gaps=self._most_gaps,
            origin=measured.origin if measured else NO_CALIBRATION,
            seed=self._seed,
        )
        if found.failures or not answers:
            return found
        self._require_fit(answers)
        blocks = Blocks(answers, self._seed)
        if not len(blocks):
            count = sum(len(answer.output) for answer in blocks.answers)
            fewer = f"{count} tokens are fewer than a block of {BLOCK_TOKENS}"
            return replace(found, notes=(*found.notes, fewer))
        validator, claimed = self.validator.with_other(blocks.forwards), blocks.claims()
        unit = f"blocks of {BLOCK_TOKENS} tokens"
        ours = Truth(validator.truth, blocks.width, AT_ONCE, validator=validator, unit=unit)
        judges = self.sketch_judges(blocks, ours, chances)
        sketches = verify(claimed, claimed.nonces, ours, judges, progress)
        return replace(found, sketches=sketches)

    def calibration(
        self,
        name: str,
        servers: Mapping[str, KernelFacts],
        chats: Sequence[Conversation],
        progress: Progress,
    ) -> CalibrationFile:
        """That of the model ``name``, by ``chats`` with honest ``servers``, by their sketch keys.

        Raises ReportedError for the first receipt that does not check.
        """
        checked = self.checked(chats, NodeFacts(self.weights_digest))
        failed = (f"{each.check}: {each.text}" for each in checked.failures)
        for text in (*failed, *(f"{gap.kind}: {gap.text}" for gap in checked.gaps)):
            raise ReportedError(f"the server is not honest, or not of this checkpoint: {text}")
        shape = checkpoint_shape(self._setup.model)
        about = {"model": name, "shape": shape, "kv_dtype": self._setup.kv_dtype}
        blocks = Blocks(distinct(checked.answers)[0], self._seed)
        validator = self.validator.with_other(blocks.forwards)
        return chat_calibration(about, servers, blocks, validator, progress)

    def checked(self, chats: Sequence[Conversation], known: NodeFacts) -> CheckedChats:
        """The answers whose receipts hold, and what fails or is missing."""
        network = self.validator.published
        known = replace(known, vocabulary=network.vocabulary, longest=network.max_seq_len)
        return checked_answers(chats, self._tokenizer, known)

    def _require_fit(self, answers: Sequence[Answer]) -> None:
        lengths = sorted({answer.scheme.k_dim for answer in answers})
        if len(lengths) > 1:
            raise ReportedError(f"k_dim: the receipts have several: {lengths}; give one at a time")
        if self._measured is not None:
            theirs = {"scheme": SCHEME, "seq_len": BLOCK_TOKENS, "k_dim": lengths[0]}
            model, digest = self._setup.model, self.weights_digest
            self._measured.require_fields(theirs, [model.name], checkpoint_shape(model), digest)

    def sketch_judges(
        self, blocks: Blocks, ours: Truth, chances: Chances
    ) -> list[Judge[ClaimError]]:
        """The tests of who read ``blocks``."""
        options = JudgingOptions(**asdict(replace(chances, kept=_KEPT)), threshold=self._measured)
        return judges_of(options, len(blocks), ours, orders_by(self._seed))


def chat_calibration(
    about: Mapping[str, object],
    servers: Mapping[str, KernelFacts],
    blocks: Blocks,
    validator: "CheckpointValidator",
    progress: Progress,
) -> CalibrationFile:
    """The calibration by answers of honest servers; all of them have to be in ``blocks``.

    ``about`` has the file's ``model``, ``shape`` and ``kv_dtype``. Every server is a population,
    and so is every emulated kernel. Raises ReportedError for too few blocks, and EngineFault.
    """
    progress.step(f"recomputing {len(blocks.answers)} answers")
    numbers, groups = _in_turn(blocks)
    vectors = vectors_of(blocks.claims().claims, blocks.width)
    sent = [
        (servers[key], {number: vectors[number] for number in of})
        for key, of in blocks.by_server().items()
    ]
    runs = honest_runs(sent, validator.truth(numbers))
    plan = MeasuringPlan(numbers, EMULATED_BLOCKS, BANK_BLOCKS * len(runs))
    work = {
        "scheme": SCHEME,
        "stronger_rng": False,
        "seq_len": BLOCK_TOKENS,
        "k_dim": blocks.k_dim,
        # Chats are of no block of a chain, and a sketch is under the server's own key.
        "block_hash": "",
        "public_key": "",
        "groups": list(groups),
    }
    return measured_calibration(validator, runs, plan, {**about, **work}, progress)


def _in_turn(blocks: Blocks) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All blocks and their conversations: one whole conversation of each server in turn."""
    conversations = blocks.conversations()
    every = blocks.by_server().values()
    of_servers = [dict.fromkeys(conversations[block] for block in of) for of in every]
    turns = chain.from_iterable(zip_longest(*of_servers))
    order = {conversation: place for place, conversation in enumerate(turns)}
    numbers = sorted(conversations, key=lambda block: order[conversations[block]])
    return tuple(numbers), tuple(conversations[block] for block in numbers)


def calibration_lines(made: CalibrationFile, chats: int) -> Iterator[str]:
    """What was measured, for a reader."""
    yield f"{chats} chats, {made.nonces} blocks of {made.seq_len} tokens"
    for fields in made.populations:
        run, reference = fields.figures.figures, nearest(fields.figures.figures, made.references)
        ratio = np.median(run.lengths / made.own(reference).lengths[run.rows])
        kind = "emulated" if fields.facts.emulated else "measured"
        kept = float(run.footprints[reference].mean())
        said = f"errors {ratio:.2f} times, footprint {kept:.2f} of {reference}"
        yield f"{fields.facts.name} ({kind}): {said}"
    yield from left_out_lines(made.left_out)


def distinct(answers: Sequence[Answer]) -> tuple[tuple[Answer, ...], list[str]]:
    """``answers`` less those that repeat another's tokens, and so its errors; which these are."""
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], Answer] = {}
    repeated = []
    for answer in answers:
        kept = first.setdefault((answer.prompt, answer.output), answer)
        if kept is not answer:
            repeated.append(f"{answer.name}: the same chat as {kept.name}; both count as one")
    return tuple(first.values()), repeated
