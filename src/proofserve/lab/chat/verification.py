"""The verdict over chat answers: what the receipts state, their sketches, and their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proofserve.lab.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.lab.chat.chat_tokens import FailedCheck
from proofserve.lab.chat.token_judge import GreedyLimit, TokenReader, judge_tokens
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Chances, Finding, Judge, Vectors
from proofserve.lab.verify.verification import Recomputation, Verification, verify
from proofserve.protocol.verdict.sequential import SequentialResult

# Blocks that are recomputed in one call: those of a few conversations.
AT_ONCE = 32


class AnswerValidator(TokenReader, Protocol):
    def truth(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of blocks by the published model. Raises EngineFault."""


@dataclass(frozen=True, slots=True)
class ChatOutcome:
    """``sketches`` is None if the answers together have no whole block of tokens.

    Of all ``choices``, ``answers`` were checked, and ``without_receipt`` had none. ``unknown`` says
    of each answer that could not be checked why. ``closest`` is the honest kernel of the
    calibration that explains the sketches best.
    """

    failures: tuple[FailedCheck, ...]
    sketches: Verification | None
    tokens: Finding | None
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
    def findings(self) -> tuple[Finding, ...]:
        of_sketches = self.sketches.findings if self.sketches else ()
        return (*of_sketches, self.tokens) if self.tokens else of_sketches


@dataclass(frozen=True, slots=True)
class ChatTests:
    """How answers are judged; ``judges`` makes those of the sketches with their half of alpha."""

    judges: Callable[[Chances, int], Sequence[Judge]]
    greedy: GreedyLimit | None
    chances: Chances


def verify_answers(
    blocks: Blocks, validator: AnswerValidator, tests: ChatTests, progress: Progress
) -> tuple[Verification | None, Finding]:
    """What the sketches and the tokens of the answers in ``blocks`` say.

    Raises LabError if the own recomputation is not complete, and EngineFault if it fails.
    """
    half = Chances(tests.chances.alpha / 2, tests.chances.beta, tests.chances.share)
    tokens = judge_tokens(blocks.answers, validator, tests.greedy, half, progress)
    if not len(blocks):
        return None, tokens
    claimed = blocks.claims()
    unit = f"blocks of {BLOCK_TOKENS} tokens"
    ours = Recomputation(validator.truth, blocks.width, AT_ONCE, unit)
    judges = tests.judges(half, len(blocks))
    return verify(claimed, claimed.nonces, ours, judges, progress), tokens


def missing_text(answers: Sequence[Answer]) -> str:
    count = sum(len(answer.output) for answer in answers)
    return f"{count} tokens are fewer than a block of {BLOCK_TOKENS}"


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
