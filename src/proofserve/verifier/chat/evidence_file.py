"""What a watch knows of a provider, in a file of JSON lines: a watch that ends goes on later.

Lines are added and never changed. The first one says what the others rest on. A line that a crash
cut is dropped, and its answers with it: they count when they are read again.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from proofserve.protocol.receipts.record import Sampling
from proofserve.reports import ReportedError
from proofserve.verifier.chat.writers import WrittenAnswer
from proofserve.verifier.written.readings import AnyRead, ReadAnswer, SuspectReading

Line = dict[str, Any]


class EvidenceFile:
    """``rests_on`` are the checkpoint and the options, which have to be those of earlier lines.

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


def line_of(read: AnyRead, by_writers: Mapping[str, SuspectReading]) -> Line:
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


def read_of(line: Line) -> tuple[AnyRead, dict[str, SuspectReading]]:
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


def reads_in(lines: Sequence[Line]) -> Iterator[tuple[AnyRead, dict[str, SuspectReading]]]:
    """Raises ReportedError for a line that is none."""
    for line in lines:
        for each in line.get("answers", ()):
            try:
                yield read_of(each)
            except (LookupError, TypeError, ValueError) as error:
                raise ReportedError(f"--evidence: a line is damaged: {error!r}") from error
