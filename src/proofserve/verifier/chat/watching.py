"""Checks a provider's answers, one after the other, and remembers what they showed."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from typing_extensions import TypedDict

from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.evidence_file import EvidenceFile, line_of, reads_in
from proofserve.verifier.chat.findings import MOST_GAPS, GapKind, leave_open
from proofserve.verifier.chat.verification import ChatRecord, ChatVerification
from proofserve.verifier.chat.writers import Writers, written
from proofserve.verifier.judges import Chances
from proofserve.verifier.written.readings import AnyRead

Judge = Callable[[Sequence[Conversation], Chances], ChatVerification]


class WatchRecord(TypedDict):
    """What ``watch-chat --out`` writes: ``Watch`` as JSON."""

    chats: int
    answers: int
    gaps: dict[GapKind, int]
    unproved: str
    unreadable: int
    times_cleared: int
    last: ChatRecord | None


class Watch:
    """Checks one answer after the other, for as long as a validator likes.

    *Read by*: chats are added to a window until it clears the node; then a new window begins, so
    that a node that cheats later is judged by later answers alone. The chances of all windows to
    convict an honest node add up to half of ``chances.alpha``: window w has 1/(w (w + 1)) of it.
    *Written by*: the tokens of all answers count together; ``writers`` have the other half.

    ``honest`` counts the windows that cleared the node, ``unreadable`` chats that could not be
    asked or read. Beyond a share of ``most_gaps`` among all answers no node is honest. With a
    ``file`` of an earlier watch it goes on: the same chats count once, and alpha is spent once.
    """

    def __init__(
        self,
        judge: Judge,
        writers: Writers,
        chances: Chances,
        most_gaps: float = MOST_GAPS,
        file: EvidenceFile | None = None,
        seed: str = "",
    ) -> None:
        self._judge = judge
        self._writers = writers
        self._chances = replace(chances, alpha=chances.alpha / 2)
        self._most_gaps = most_gaps
        self._seed = seed
        self._file = file
        self._open: list[Conversation] = []
        self._known: set[str] = set()
        self._unkept: list[str] = []
        # Of the windows before.
        self._gaps: Counter[GapKind] = Counter()
        self.gaps: Counter[GapKind] = Counter()
        self.window = 1
        self.convicted = False
        self.chats = self.answers = self.unreadable = self.honest = 0
        self.last: ChatVerification | None = None
        if file is not None:
            self._go_on(file)

    def _go_on(self, file: EvidenceFile) -> None:
        """A window that did not end has had its chance to convict: a new one begins."""
        for read, by in reads_in(file.lines):
            self._writers.restore(read, by)
        for line in file.lines:
            self.window, self.convicted = line["window"] + 1, line["convicted"]
            self._known |= {*line.get("keys", ())}
            if totals := line.get("totals"):
                self.chats, self.answers, self.honest, gaps = totals
                self._gaps = Counter({GapKind(kind): count for kind, count in gaps.items()})
        self.gaps = self._gaps

    @property
    def unproved(self) -> str:
        return leave_open(self.gaps, self.answers, self._most_gaps)

    def add(self, chats: Sequence[Conversation]) -> SequentialResult:
        """The verdict with ``chats``, which are judged with the next ones if the judge raises."""
        fresh = {key_of(chat): chat for chat in chats}
        new = [chat for key, chat in fresh.items() if key not in self._known]
        self._unkept += [key for key in fresh if key not in self._known]
        self._known |= fresh.keys()
        self._open += new
        self.chats += len(new)
        self.answers += sum(len(chat.choices) for chat in new)
        alpha = self._chances.alpha / (self.window * (self.window + 1))
        found = self._judge(self._open, Chances(alpha, self._chances.beta))
        read = self._writers.add([written(each, self._seed) for each in found.answers])
        self.last = outcome = replace(found, writer=self._writers.finding())
        self.gaps = self._gaps + outcome.counts
        self.convicted |= outcome.of_answers is SequentialResult.FRAUD
        if outcome.read_by is SequentialResult.HONEST:
            self.honest += 1
            self.window += 1
            self._open, self._gaps = [], self.gaps
        self._keep(read)
        if self.convicted:
            return SequentialResult.FRAUD
        return SequentialResult.UNPROVED if self.unproved else outcome.of_answers

    def close(self) -> None:
        """Read with the alternatives what waits for it, and keep it. That may convict, too."""
        compared = self._writers.compare()
        self.convicted |= self._writers.finding().convicts
        self._keep(compared)

    def _keep(self, compared: Sequence[AnyRead]) -> None:
        """Chats are kept together with their answers, once all is known of these."""
        if self._file is None:
            return
        line: dict[str, object] = {"window": self.window, "convicted": self.convicted}
        if not self._writers.waiting:
            answers = [line_of(each, self._writers.by_writers(each)) for each in compared]
            totals = (self.chats, self.answers, self.honest, self.gaps)
            line |= {"keys": self._unkept, "answers": answers, "totals": totals}
            self._unkept = []
        self._file.add(line)

    def record(self) -> WatchRecord:
        return {
            "chats": self.chats,
            "answers": self.answers,
            "gaps": self.gaps,
            "unproved": self.unproved,
            "unreadable": self.unreadable,
            "times_cleared": self.honest,
            "last": self.last.record() if self.last else None,
        }


def key_of(chat: Conversation) -> str:
    """The same for the same request and response, whatever their file is called."""
    text = json.dumps([chat.request, chat.response], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
