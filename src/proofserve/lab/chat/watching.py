"""Checks one answer after the other for as long as a validator likes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proofserve.lab.chat.conversation import Conversation
from proofserve.lab.chat.report import ChatReport
from proofserve.lab.chat.verification import ChatOutcome
from proofserve.lab.verify.judges import Chances
from proofserve.protocol.verdict.sequential import SequentialResult

Judge = Callable[[Sequence[Conversation], Chances], ChatOutcome]


@dataclass(slots=True)
class Totals:
    """``honest`` counts the times that enough answers cleared the node.

    ``unreadable`` counts chats that could not be asked, or that were none when they were read.
    """

    chats: int = 0
    answers: int = 0
    without_receipt: int = 0
    unreadable: int = 0
    honest: int = 0


class Watch:
    """Adds chats to a window until it clears the node; then a new window begins.

    A node that cheats later is thus judged by later answers alone. The chances of all windows
    together to convict an honest node add up to ``chances.alpha``: window w has 1/(w (w + 1)).
    """

    def __init__(self, judge: Judge, chances: Chances, origin: str, seed: str) -> None:
        self._judge = judge
        self._chances = chances
        self._origin = origin
        self._seed = seed
        self._window: list[Conversation] = []
        self.totals = Totals()
        self.report: ChatReport | None = None

    def add(self, chats: Sequence[Conversation]) -> SequentialResult:
        """The verdict over the present window with ``chats``.

        Raises what the judge raises; the chats are in the window then too.
        """
        window = self.totals.honest + 1
        chances = Chances(self._chances.alpha / (window * (window + 1)), self._chances.beta)
        self._window += chats
        self.totals.chats += len(chats)
        self.totals.answers += sum(len(chat.choices) for chat in chats)
        self.totals.without_receipt += sum(chat.without_receipt for chat in chats)
        outcome = self._judge(self._window, chances)
        self.report = ChatReport(outcome, self._origin, self._seed)
        if outcome.verdict is SequentialResult.HONEST:
            self.totals.honest += 1
            self._window = []
        return outcome.verdict

    def record(self) -> dict[str, object]:
        totals = self.totals
        return {
            "chats": totals.chats,
            "answers": totals.answers,
            "answers_without_receipt": totals.without_receipt,
            "unreadable": totals.unreadable,
            "times_cleared": totals.honest,
            "last": self.report.record() if self.report else None,
        }
