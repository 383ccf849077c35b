"""The receipts of the demo's chats, checked as ``proofserve verify-chat`` does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.markup import escape

from proofserve.cli.model import trained_calibration
from proofserve.cli.session import CommandSession
from proofserve.lab.calibrate import calibration_file
from proofserve.lab.chat.collecting import ReceiptClient
from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.prompts import requests
from proofserve.lab.chat.statements import Known
from proofserve.lab.chat.verification import ChatOutcome
from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.receipts.record import SCHEME
from proofserve.protocol.verdict.sequential import SequentialResult

CHATS, TOKENS, SEED = 4, 48, 1
CHANCES = Chances(alpha=1e-6, beta=1e-3)


def answers_with_receipts(url: str, model: str, session: CommandSession) -> list[Conversation]:
    """Raises LabError if an answer has no receipt."""
    with ReceiptClient(url) as client:
        found = client.chats(requests(model, SEED, CHATS, TOKENS), CHATS, session.line)
    if any(len(chat.receipts) < len(chat.choices) for chat in found):
        raise LabError("an answer has no receipt")
    _say("Receipts", f"the server signed one for each of {CHATS} more answers", session)
    return found


def receipts_are_judged_right(
    model: Path, chats: Sequence[Conversation], session: CommandSession
) -> bool:
    """Print what the receipts say of the answers, and of an answer with another token."""
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.wiring.chat.checker import ChatChecker, CheckerSetup  # noqa: PLC0415

    with trained_calibration(SCHEME) as file:
        checker = ChatChecker(CheckerSetup(model, calibration_file.read(file)))
    known = Known(checker.weights_digest)
    honest = checker.outcome(chats, known, CHANCES, session.line)
    forged = checker.outcome([_altered(chats[0])], known, CHANCES, session.line)
    _say("Receipts", f"{CHATS} answers: {honest.verdict} ({_tests(honest)})", session)
    said = ", ".join(f"{each.check}: {each.text}" for each in forged.failures)
    _say("", f"one with another token: {forged.verdict} ({said})", session)
    expected = (SequentialResult.HONEST, SequentialResult.FRAUD)
    return (honest.verdict, forged.verdict) == expected


def _altered(chat: Conversation) -> Conversation:
    choice = chat.choices[0]
    ids = choice.token_ids or ()
    return replace(chat, choices=(replace(choice, token_ids=(ids[-1], *ids[1:-1], ids[0])),))


def _tests(outcome: ChatOutcome) -> str:
    passed = [each.test for each in outcome.findings if each.result is SequentialResult.HONEST]
    return ", ".join(("signature", "log", "prompt", "answer", "sampling", *passed))


def _say(label: str, text: str, session: CommandSession) -> None:
    line = f"[bold]{label:9}[/bold] {escape(text)}"
    session.console.print(line, highlight=False, soft_wrap=True)
