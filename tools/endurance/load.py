"""The load of a trial, chat and rounds of both protocols in turn; and a witness of its results.

The witness polls a node's results without a pause and keeps every result that the node ever showed.
"""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from proofserve.remote.node_client import NodeClient
from proofserve.remote.prompts import prompt
from proofserve.remote.records import AnyWork, DistanceWork, Work
from proofserve.reports import NodeError
from proofserve.rounds.records import StoredResult
from proofserve_lab.chats import Call, chat
from proofserve_lab.nodes import status_of

ANSWER_TOKENS = 16
SEQ_LEN = 64
BATCH = 16


POLL_S = 0.05
ANSWER_S = 5.0


def endless_chat(model: str) -> Callable[[int], Call]:
    """A function that makes a short chat request of a number; each differs from all others."""
    return lambda number: chat(model, prompt(number), ANSWER_TOKENS)


def order(number: int, model: str, callback_url: str) -> AnyWork:
    """The order of round ``number``; every nonce of it gives a result."""
    block = f"block-{number}"
    kind = DistanceWork if number % 2 else Work
    return kind(model, block, seq_len=SEQ_LEN, batch_size=BATCH, callback_url=callback_url)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results that the witness saw, compared with the final results.

    ``lost`` results were shown once and are now missing or different. ``overstated`` rounds once
    counted more results than they have. (A round that judges counts verdicts too: leave it out.)
    """

    seen: int
    lost: int
    overstated: int


class Witness:
    """Polls a node from its own thread each ``poll_s`` seconds; if it is down, it tries again."""

    def __init__(self, url: str, poll_s: float = POLL_S) -> None:
        self._url = url
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="witness")
        self._seen: dict[int, StoredResult] = {}
        self._counted: dict[str, int] = {}
        self.newest = 0
        """The sequence number of the newest result that it saw."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stop.set()
        self._thread.join()

    def compare(self, final: list[StoredResult]) -> Comparison:
        """Compare with ``final``, all results at the end. Call it after the context has ended."""
        by_seq = {row.seq: row for row in final}
        lost = sum(by_seq.get(seq) != row for seq, row in self._seen.items())
        rows = Counter(row.round_id for row in final)
        overstated = sum(rows[name] < count for name, count in self._counted.items())
        return Comparison(len(self._seen), lost, overstated)

    def saw(self, round_id: str | None, counted: int, rows: list[StoredResult]) -> None:
        """Keep one reading: the count of the round, and the results that the node showed."""
        if round_id is not None:
            self._counted[round_id] = max(self._counted.get(round_id, 0), counted)
        for row in rows:
            # Kept by sequence number: if a number were used twice, ``compare`` would see it.
            self._seen.setdefault(row.seq, row)

    def _poll(self) -> None:
        with NodeClient(self._url, timeout_s=ANSWER_S) as node:
            while not self._stop.wait(self._poll_s):
                try:
                    status = status_of(node)
                    rows = node.results(self.newest)
                except NodeError:
                    continue
                self.saw(status.round_id, status.processed, rows)
                self.newest = rows[-1].seq if rows else self.newest
