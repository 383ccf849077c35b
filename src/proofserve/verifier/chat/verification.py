"""The verdict over chat answers: what the receipts state, their sketches, and their tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proofserve.lab.report import LabError, Progress
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.receipts.record import SCHEME
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.calibration_file import (
    KV_AUTO,
    CalibrationFile,
    GreedyLimit,
    calibrated,
    checkpoint_shape,
)
from proofserve.verifier.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.verifier.chat.calibration import CalibratedServers, chat_calibration
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.statements import FailedCheck, NodeFacts, Readable, checked_answers
from proofserve.verifier.chat.token_judge import judge_tokens
from proofserve.verifier.judges import Chances, Opinion
from proofserve.verifier.judging import DIRECTION, JudgingOptions, judges_of
from proofserve.verifier.verification import Recomputation, Verification, verify

if TYPE_CHECKING:
    from proofserve.verifier.chat.validator import ChatValidator

# Blocks that are recomputed in one call: those of a few conversations.
AT_ONCE = 32
WHAT_TO_MEASURE: Final = (
    "No verdict: no honest kernel that is known explains these errors, and no fraud that is known."
    " If a server of this kind is trusted, measure it: proofserve calibrate chat MODEL --url URL"
    " --out FILE"
)
# Of the count, which does not judge chats.
_P_FRAUD = 0.5
NO_CALIBRATION = (
    "none; kernels were emulated on the same answers. So it takes some 40 blocks to convict, and"
    " greedy answers' tokens are not tested; write a calibration by `calibrate chat`"
)


@dataclass(frozen=True, slots=True)
class ChatVerification:
    """``sketches`` is None if the answers together have no whole block of tokens.

    Of all ``choices``, ``answers`` were checked, and ``without_receipt`` had none. ``unknown`` says
    of each answer that could not be checked why. ``closest`` is the honest kernel of the
    calibration that explains the sketches best.
    """

    failures: tuple[FailedCheck, ...]
    sketches: Verification | None
    tokens: Opinion | None
    answers: int
    without_receipt: int
    unknown: tuple[str, ...]
    choices: int
    closest: str | None = None

    @property
    def verdict(self) -> SequentialResult:
        """One failure is enough to convict; only the sketches can clear."""
        tokens = self.tokens.result if self.tokens else SequentialResult.UNDECIDED
        sketches = self.sketches.verdict if self.sketches else SequentialResult.UNDECIDED
        if self.failures or SequentialResult.FRAUD in {tokens, sketches}:
            return SequentialResult.FRAUD
        return sketches

    @property
    def opinions(self) -> tuple[Opinion, ...]:
        of_sketches = self.sketches.opinions if self.sketches else ()
        return (*of_sketches, self.tokens) if self.tokens else of_sketches


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
        # These import transformers, which takes seconds.
        from proofserve.verifier.chat import validator  # noqa: PLC0415
        from proofserve.verifier.validator import ValidatorSetup  # noqa: PLC0415

        self._setup = setup
        self._tokenizer = validator.CheckpointTokenizer(setup.model)
        made = ValidatorSetup(setup.model, setup.device, setup.suspects, kv_dtype=setup.kv_dtype)
        if setup.measured is not None:
            served, kept = setup.measured.served_dtype, setup.measured.kv_dtype
            made = replace(made, served_dtype=served, kv_dtype=kept)
        self.validator = validator.ChatValidator(made)
        if (digest := self.validator.weights_digest) is None:
            raise LabError(f"{setup.model}: its weights have no digest: no safetensors files")
        self.weights_digest = digest

    @property
    def origin(self) -> str:
        measured = self._setup.measured
        return measured.origin if measured else NO_CALIBRATION

    def outcome(
        self, chats: Sequence[Conversation], known: NodeFacts, chances: Chances, progress: Progress
    ) -> ChatVerification:
        """The verdict over all ``chats``. Raises EngineFault if a forward fails."""
        answers, failures, unknown, missing = self._checked(chats, known)
        choices = sum(len(chat.choices) for chat in chats)
        if failures or not answers:
            return ChatVerification(failures, None, None, len(answers), missing, unknown, choices)
        self._require_fit(answers)
        blocks = Blocks(answers, self._setup.seed)
        if not len(blocks):
            count = sum(len(answer.output) for answer in answers)
            fewer = f"{count} tokens are fewer than a block of {BLOCK_TOKENS}"
            unknown = (*unknown, fewer)
        # Tokens and sketches each have half of alpha.
        half = replace(chances, alpha=chances.alpha / 2)
        validator = self.validator.reading(blocks)
        tokens = judge_tokens(blocks.answers, validator, self._greedy, half, progress)
        sketches = self._of_sketches(blocks, validator, half, progress) if len(blocks) else None
        measured, closest = self._setup.measured, None
        if measured is not None and sketches is not None:
            closest = measured.honest.names[sketches.closest]
        return ChatVerification(
            (), sketches, tokens, len(answers), missing, unknown, choices, closest
        )

    def calibration(
        self, about: CalibratedServers, chats: Sequence[Conversation], progress: Progress
    ) -> CalibrationFile:
        """By ``chats`` with honest servers. Raises LabError for the first that does not check."""
        answers, failures, unknown, _ = self._checked(chats, NodeFacts(self.weights_digest))
        for text in (*(f"{each.check}: {each.text}" for each in failures), *unknown):
            raise LabError(f"the server is not honest, or not of this checkpoint: {text}")
        blocks = Blocks(answers, self._setup.seed)
        return chat_calibration(about, blocks, self.validator.reading(blocks), progress)

    def _checked(
        self, chats: Sequence[Conversation], known: NodeFacts
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

    def _of_sketches(
        self, blocks: Blocks, validator: "ChatValidator", chances: Chances, progress: Progress
    ) -> Verification:
        """Raises LabError if our own recomputation is not complete."""
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
        claimed = blocks.claims()
        unit = f"blocks of {BLOCK_TOKENS} tokens"
        ours = Recomputation(validator.truth, blocks.width, AT_ONCE, unit)
        judges = judges_of(options, len(blocks), validator)
        return verify(claimed, claimed.nonces, ours, judges, progress)

    @property
    def _greedy(self) -> GreedyLimit | None:
        return self._setup.measured.greedy if self._setup.measured else None


def distinct(answers: Sequence[Answer]) -> tuple[list[Answer], list[str]]:
    """``answers`` without those that repeat the tokens of another one, and which these are.

    Rounding errs alike in equal chats, so a repeated one is no further evidence.
    """
    first: dict[tuple[tuple[int, ...], tuple[int, ...]], Answer] = {}
    repeated = []
    for answer in answers:
        kept = first.setdefault((answer.prompt, answer.output), answer)
        if kept is not answer:
            repeated.append(f"{answer.name}: the same chat as {kept.name}; both count as one")
    return list(first.values()), repeated


@dataclass(frozen=True, slots=True)
class ChatReport:
    """``origin`` says where the honest figures come from, ``seed`` chose parts of long answers."""

    outcome: ChatVerification
    origin: str
    seed: str

    def lines(self) -> Iterator[str]:
        outcome = self.outcome
        yield f"{outcome.answers} answers with a receipt checked (seed {self.seed})"
        if outcome.without_receipt:
            of, share = outcome.choices, outcome.without_receipt / outcome.choices
            yield f"{outcome.without_receipt} of {of} answers have no receipt ({share:.0%})"
        for failure in outcome.failures:
            yield f"  {failure.check:9} fraud: {failure.text}"
        for opinion in outcome.opinions:
            yield f"  {opinion.test:9} {opinion.result}: {opinion.text}"
        for reason in outcome.unknown:
            yield f"  not checked: {reason}"
        if outcome.closest is not None:
            yield f"Closest honest kernel: {outcome.closest}."
        if outcome.verdict is SequentialResult.UNDECIDED:
            yield "More answers are needed: give several files."
        if outcome.verdict is SequentialResult.UNEXPLAINED:
            yield WHAT_TO_MEASURE
        yield f"Honest figures: {self.origin}."

    def record(self) -> dict[str, object]:
        outcome = self.outcome
        return {
            "verdict": outcome.verdict,
            "choices": outcome.choices,
            "answers": outcome.answers,
            "without_receipt": outcome.without_receipt,
            "not_checked": list(outcome.unknown),
            "failures": [asdict(each) for each in outcome.failures],
            "findings": [asdict(each) for each in outcome.opinions],
            "closest": outcome.closest,
            "figures_from": self.origin,
            "seed": self.seed,
        }


class Watch:
    """Checks one answer after the other, for as long as a validator likes.

    Chats are added to a window until it clears the node; then a new window begins.

    A node that cheats later is thus judged by later answers alone. The chances of all windows
    together to convict an honest node add up to ``chances.alpha``: window w has 1/(w (w + 1)).
    ``honest`` counts the times that enough answers cleared the node, ``unreadable`` chats that
    could not be asked, or that were none when they were read.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[Conversation], Chances], ChatVerification],
        chances: Chances,
        origin: str,
        seed: str,
    ) -> None:
        self._judge = judge
        self._chances = chances
        self._origin = origin
        self._seed = seed
        self._window: list[Conversation] = []
        self.chats = self.answers = self.without_receipt = self.unreadable = self.honest = 0
        self.report: ChatReport | None = None

    def add(self, chats: Sequence[Conversation]) -> SequentialResult:
        """The verdict over the present window with ``chats``.

        Raises what the judge raises; the chats are in the window then too.
        """
        window = self.honest + 1
        chances = Chances(self._chances.alpha / (window * (window + 1)), self._chances.beta)
        self._window += chats
        self.chats += len(chats)
        self.answers += sum(len(chat.choices) for chat in chats)
        self.without_receipt += sum(chat.without_receipt for chat in chats)
        outcome = self._judge(self._window, chances)
        self.report = ChatReport(outcome, self._origin, self._seed)
        if outcome.verdict is SequentialResult.HONEST:
            self.honest += 1
            self._window = []
        return outcome.verdict

    def record(self) -> dict[str, object]:
        return {
            "chats": self.chats,
            "answers": self.answers,
            "answers_without_receipt": self.without_receipt,
            "unreadable": self.unreadable,
            "times_cleared": self.honest,
            "last": self.report.record() if self.report else None,
        }
