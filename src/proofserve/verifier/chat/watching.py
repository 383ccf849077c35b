"""Checks a provider's answers, one after the other, and remembers what they showed."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.recorder import now_ms
from proofserve.reports import ReportedError
from proofserve.verifier.chat.conversation import Conversation, PublicLog, ReceiptClient
from proofserve.verifier.chat.statements import MOST_GAPS, FailedCheck, GapKind, leave_open
from proofserve.verifier.chat.verification import ChatRecord, ChatVerification
from proofserve.verifier.chat.writers import Writers, written
from proofserve.verifier.judges import Chances
from proofserve.verifier.written.readings import ReadAnswer, SuspectReading, WrittenAnswer

Line = dict[str, Any]


class EvidenceFile:
    """What a watch knows of a provider, in JSON lines: a watch that ends goes on later.

    Lines are added and never changed. A line that a crash cut is dropped, and its answers with it:
    they count when they are read again. The first line says what the others rest on: ``rests_on``
    are the checkpoint and the options, which have to be those of earlier lines.

    Raises ReportedError for a file that cannot be used, naming it and what is wrong.
    """

    def __init__(self, path: Path, rests_on: Mapping[str, object]) -> None:
        self._path = path
        first = {"format": "proofserve-evidence", "version": 1, **rests_on}
        try:
            self.lines = self._read()
            if not self.lines:
                path.write_text(f"{json.dumps(first)}\n", encoding="utf-8")
        except OSError as error:
            raise ReportedError(f"--evidence: {path}: {error.strerror}") from error
        theirs = self.lines[0] if self.lines else first
        for name, value in first.items():
            if theirs.get(name) != value:
                text = f"{name}: the file has {theirs.get(name)}, this watch {value}"
                raise ReportedError(f"--evidence: {path}: {text}; give another file")
        del self.lines[:1]

    def _read(self) -> list[Line]:
        if not self._path.exists():
            return []
        raw = self._path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            self._path.write_bytes(whole)
        try:
            lines = [json.loads(each) for each in whole.splitlines()]
        except ValueError as error:
            raise ReportedError(f"--evidence: {self._path} is not a file of watch-chat") from error
        if not all(isinstance(each, dict) for each in lines):
            raise ReportedError(f"--evidence: {self._path} is not a file of watch-chat")
        return lines

    def add(self, line: Line) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            raise ReportedError(f"--evidence: {self._path}: {error.strerror}") from error


def line_of(read: ReadAnswer, by_writers: Mapping[str, SuspectReading]) -> Line:
    """An answer and what was read of it, by the published weights and by others."""
    answer = read.answer
    return {
        "prompt": list(answer.prompt_ids),
        "output": list(answer.output_ids),
        "first": answer.first,
        "sampling": asdict(answer.sampling),
        "log_factors": read.log_factors.tolist(),
        "gaps": [gap for gap in read.gaps.tolist() if gap > 0.0] if read.is_greedy else [],
        "rounding": float(read.rounding.max()),
        "noise": read.noise,
        "excluded": read.excluded,
        "writers": {
            name: [by.log_ratio, by.against, by.divergence] for name, by in by_writers.items()
        },
    }


def read_of(line: Line) -> tuple[ReadAnswer, dict[str, SuspectReading]]:
    """What ``line_of`` wrote, as far as the judges of tokens need it."""
    ids = tuple(line["prompt"]), tuple(line["output"])
    answer = WrittenAnswer(*ids, Sampling(**line["sampling"]), line["first"])
    tokens = len(answer.read[1])
    read = ReadAnswer(
        answer,
        np.zeros(tokens),
        # Their places in the answer do not matter.
        np.array([*line["gaps"], *[0.0] * (tokens - len(line["gaps"]))]),
        np.array([line["rounding"]]),
        line["noise"],
        line["excluded"],
        np.array(line["log_factors"]),
    )
    by = {
        name: SuspectReading(log_ratio, against, divergence, np.zeros(0))
        for name, (log_ratio, against, divergence) in line["writers"].items()
    }
    return read, by


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
        for line in file.lines:
            for each in line.get("answers", ()):
                try:
                    read, by = read_of(each)
                except (LookupError, TypeError, ValueError) as error:
                    raise ReportedError(f"--evidence: a line is damaged: {error!r}") from error
                self._writers.restore(read, by)
            self.window, self.convicted = line["window"] + 1, line["convicted"]
            self._known |= {*line.get("keys", ())}
            if totals := line.get("totals"):
                self.chats, self.answers, self.honest, gaps = totals
                self._gaps = Counter({GapKind(kind): count for kind, count in gaps.items()})
        self.gaps = self._gaps

    @property
    def unproved(self) -> str:
        return leave_open(self.gaps, self.answers, self._most_gaps)

    @property
    def stays_honest(self) -> bool:
        """Whether earlier answers cleared the node, and later ones are too few to tell."""
        if not (self.honest and self.last) or self.unproved:
            return False
        writer = self.last.writer
        untold = self.last.read_by is SequentialResult.UNDECIDED
        return untold and (writer is None or writer.enough)

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

    def _keep(self, compared: Sequence[ReadAnswer]) -> None:
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


class LogFollower:
    """Reads the log of the node at ``url``, from the first entry that a receipt needs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._log: PublicLog | None = None

    def seen(self, chats: Sequence[Conversation]) -> PublicLog | FailedCheck | None:
        """The log with its new entries; None if no receipt yet was in one.

        A failure if the log forks, or its entries do not follow each other or are not signed by
        the key of the receipts. Raises NodeError and ReportedError as ``ReceiptClient``.
        """
        logged = [each for chat in chats for each in chat.receipts if each.inclusion]
        places = [each.inclusion.entry.index for each in logged if each.inclusion]
        if not places:
            return self._log
        needed = min(places)
        if self._log is not None and self._log.first is not None and self._log.last is not None:
            # Receipts do not come in the order of the log. The last known entry comes once more,
            # because the new ones have to follow it.
            needed = needed if needed < self._log.first else self._log.last
        with ReceiptClient(self._url) as node:
            entries = node.log(after=needed - 1)
        try:
            if self._log is None:
                self._log = PublicLog(entries, logged[0].public_key)
            else:
                self._log.add(entries)
        except ProtocolError as error:
            return FailedCheck("log", f"{self._url}: {error}")
        now = now_ms()
        for each in entries:
            self._log.seen_ms.setdefault(each.entry.index, now)
        return self._log
