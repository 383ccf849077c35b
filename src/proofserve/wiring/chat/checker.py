"""Checks conversations with a checkpoint and a calibration: builds what ``lab.chat`` needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from proofserve.lab.calibrate.calibration_file import CalibrationFile, calibrated, checkpoint_shape
from proofserve.lab.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.lab.chat.calibration import Calibrated, chat_calibration
from proofserve.lab.chat.chat_tokens import FailedCheck
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.statements import Known, Readable, checked_answers
from proofserve.lab.chat.token_judge import GreedyLimit
from proofserve.lab.chat.verification import (
    ChatOutcome,
    ChatTests,
    distinct,
    missing_text,
    verify_answers,
)
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Chances, Judge
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.record import SCHEME
from proofserve.wiring.chat.tokenizer import CheckpointTokenizer
from proofserve.wiring.chat.validator import ChatValidator
from proofserve.wiring.judges import DIRECTION, JudgingOptions, judges_of
from proofserve.wiring.validator import KV_AUTO, ValidatorSetup

# Of the count, which does not judge chats.
_P_FRAUD = 0.5
NO_CALIBRATION = (
    "none; kernels were emulated on the same answers. So it takes some 40 blocks to convict, and"
    " greedy answers' tokens are not tested; write a calibration by `calibrate chat`"
)


@dataclass(frozen=True, slots=True)
class CheckerSetup:
    """``seed`` chooses the compared parts of long answers: a node must not know it beforehand.

    ``suspects`` are checkpoints. ``kv_dtype`` is what honest servers may keep keys and values in,
    unless ``measured`` says it.
    """

    model: Path
    measured: CalibrationFile | None
    seed: str = field(default_factory=fresh_seed)
    device: str = "cpu"
    suspects: tuple[Path, ...] = ()
    kv_dtype: str = KV_AUTO


class ChatChecker:
    """Raises LabError and CheckpointError if the checkpoint or the calibration cannot be used."""

    def __init__(self, setup: CheckerSetup) -> None:
        self._setup = setup
        self._tokenizer = CheckpointTokenizer(setup.model)
        made = ValidatorSetup(setup.model, setup.device, setup.suspects, kv_dtype=setup.kv_dtype)
        if setup.measured is not None:
            served, kept = setup.measured.served_dtype, setup.measured.kv_dtype
            made = replace(made, served_dtype=served, kv_dtype=kept)
        self.validator = ChatValidator(made)
        if (digest := self.validator.weights_digest) is None:
            raise LabError(f"{setup.model}: its weights have no digest: no safetensors files")
        self.weights_digest = digest

    @property
    def origin(self) -> str:
        measured = self._setup.measured
        return measured.origin if measured else NO_CALIBRATION

    def outcome(
        self, chats: Sequence[Conversation], known: Known, chances: Chances, progress: Progress
    ) -> ChatOutcome:
        """The verdict over all ``chats``. Raises EngineFault if a forward fails."""
        answers, failures, unknown, missing = self._checked(chats, known)
        choices = sum(len(chat.choices) for chat in chats)
        if failures or not answers:
            return ChatOutcome(failures, None, None, len(answers), missing, unknown, choices)
        self._require_fit(answers)
        blocks = Blocks(answers, self._setup.seed)
        if not len(blocks):
            unknown = (*unknown, missing_text(answers))
        validator = self.validator.reading(blocks)
        tests = ChatTests(partial(self._judges, validator), self._greedy, chances)
        sketches, tokens = verify_answers(blocks, validator, tests, progress)
        measured, closest = self._setup.measured, None
        if measured is not None and sketches is not None:
            closest = measured.honest.names[sketches.closest]
        return ChatOutcome((), sketches, tokens, len(answers), missing, unknown, choices, closest)

    def calibration(
        self, about: Calibrated, chats: Sequence[Conversation], progress: Progress
    ) -> CalibrationFile:
        """By ``chats`` with honest servers. Raises LabError for the first that does not check."""
        answers, failures, unknown, _ = self._checked(chats, Known(self.weights_digest))
        for text in (*(f"{each.check}: {each.text}" for each in failures), *unknown):
            raise LabError(f"the server is not honest, or not of this checkpoint: {text}")
        blocks = Blocks(answers, self._setup.seed)
        return chat_calibration(about, blocks, self.validator.reading(blocks), progress)

    def _checked(
        self, chats: Sequence[Conversation], known: Known
    ) -> tuple[list[Answer], tuple[FailedCheck, ...], tuple[str, ...], int]:
        answers: list[Answer] = []
        failures: list[FailedCheck] = []
        unknown: list[str] = []
        missing = 0
        network = self.validator.published
        known = replace(known, readable=Readable(network.vocabulary, network.max_seq_len))
        for chat in chats:
            missing += chat.without_receipt
            found = checked_answers(chat, self._tokenizer, known)
            answers += found.answers
            failures += found.failures
            unknown += found.unknown
        answers, repeated = distinct(answers)
        unknown += repeated
        return answers, tuple(failures), tuple(unknown), missing

    def _require_fit(self, answers: Sequence[Answer]) -> None:
        lengths = {answer.scheme.k_dim for answer in answers}
        if len(lengths) > 1:
            raise LabError(
                f"k_dim: the receipts have several: {sorted(lengths)}; give one at a time"
            )
        if (measured := self._setup.measured) is not None:
            theirs = {"scheme": SCHEME, "seq_len": BLOCK_TOKENS, "k_dim": lengths.pop()}
            model = self._setup.model
            shape, digest = checkpoint_shape(model), self.weights_digest
            measured.require_fields(theirs, [model.name], shape, digest)

    def _judges(self, validator: ChatValidator, chances: Chances, blocks: int) -> list[Judge]:
        measured = self._setup.measured
        options = JudgingOptions(
            tests=() if measured else (DIRECTION,),
            alpha=chances.alpha,
            beta=chances.beta,
            share=chances.share,
            p_fraud=_P_FRAUD,
            sequential=True,
            threshold=calibrated(measured) if measured else None,
        )
        return judges_of(options, blocks, validator)

    @property
    def _greedy(self) -> GreedyLimit | None:
        found = self._setup.measured.greedy if self._setup.measured else None
        return GreedyLimit(found.gap, found.rate) if found else None
