"""What a callback receiver got, in one SQLite file."""

import json
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from proofserve.receiver.database import BookError, connect
from proofserve.receiver.messages import Generated, Stamp, Validated

_COUNT = """
    INSERT INTO sources VALUES (:public_key, :block_hash, :received, :stored, :validations,
                                :frauds, :now)
    ON CONFLICT DO UPDATE SET
        received = received + excluded.received, stored = stored + excluded.stored,
        validations = validations + excluded.validations, frauds = frauds + excluded.frauds,
        last_received = max(last_received, excluded.last_received)
"""
_TOTALS = """
    SELECT count(*), coalesce(sum(repeats), 0), max(received_at) FROM callbacks
"""
_SOURCES = """
    SELECT public_key, block_hash, stored, received - stored, validations, frauds, last_received
    FROM sources ORDER BY last_received DESC, public_key, block_hash
"""


@dataclass(frozen=True, slots=True)
class Source:
    """One public key in one block.

    ``artifacts`` are distinct nonces, ``duplicates`` those that came again under another key;
    ``last_received`` in seconds since the epoch.
    """

    public_key: str
    block_hash: str
    artifacts: int
    duplicates: int
    validations: int
    frauds: int
    last_received: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything in the book, the newest source first; ``repeats`` are callbacks sent again."""

    callbacks: int
    repeats: int
    last_received: float | None
    sources: tuple[Source, ...]


class Book:
    """Stores callbacks and sums them up; any thread may call it. Raises sqlite3.Error."""

    def __init__(
        self, writer: sqlite3.Connection, reader: sqlite3.Connection, clock: Callable[[], float]
    ) -> None:
        # Two connections: a glance at the summary never waits for a large callback.
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    @classmethod
    def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the file; ``clock`` gives wall-clock seconds. Raises BookError."""
        writer = connect(path)
        try:
            return cls(writer, connect(path), clock)
        except BookError:
            writer.close()
            raise

    def close(self) -> None:
        """Close the file, after the callback that is being stored."""
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def add_generated(self, body: Generated, stamp: Stamp) -> bool:
        """Store the artifacts; False when this callback came before and nothing was stored."""
        with self._writing, self._writer:
            callback = self._enter("generated", stamp)
            if callback is None:
                return False
            rows = [
                (body.block_hash, body.public_key, one.nonce, one.vector_b64, callback)
                for one in body.artifacts
            ]
            stored = self._writer.executemany(
                "INSERT INTO artifacts VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", rows
            ).rowcount
            self._count(body, received=len(rows), stored=max(stored, 0))
            return True

    def add_validated(self, body: Validated, stamp: Stamp) -> bool:
        """Store a verdict; False when this callback came before and nothing was stored."""
        with self._writing, self._writer:
            callback = self._enter("validated", stamp)
            if callback is None:
                return False
            values = body.model_dump() | {
                "callback": callback,
                "mismatch_nonces": json.dumps(body.mismatch_nonces),
            }
            self._writer.execute(
                "INSERT INTO validations VALUES (NULL, :callback, :request_id, :public_key,"
                " :block_hash, :block_height, :node_id, :n_total, :n_mismatch, :mismatch_nonces,"
                " :p_value, :fraud_detected)",
                values,
            )
            self._count(body, validations=1, frauds=int(body.fraud_detected))
            return True

    def summary(self) -> Summary:
        """The counts at this moment."""
        with self._reading, self._reader:
            self._reader.execute("BEGIN")
            callbacks, repeats, last_received = self._reader.execute(_TOTALS).fetchone()
            sources = tuple(Source(*row) for row in self._reader.execute(_SOURCES))
        return Summary(callbacks, repeats, last_received, sources)

    def _enter(self, endpoint: str, stamp: Stamp) -> int | None:
        """Begin a callback's transaction; its row number, None for one that came before."""
        self._writer.execute("BEGIN IMMEDIATE")
        row = self._writer.execute(
            "INSERT INTO callbacks (endpoint, idempotency_key, sequence, received_at)"
            " VALUES (?, ?, ?, ?)"
            " ON CONFLICT (idempotency_key) DO UPDATE SET repeats = repeats + 1"
            " RETURNING id, repeats",
            (endpoint, stamp.key, stamp.sequence, self._clock()),
        ).fetchone()
        number, repeats = row
        return None if repeats else int(number)

    def _count(
        self,
        body: Generated | Validated,
        received: int = 0,
        stored: int = 0,
        validations: int = 0,
        frauds: int = 0,
    ) -> None:
        values = {
            "public_key": body.public_key,
            "block_hash": body.block_hash,
            "received": received,
            "stored": stored,
            "validations": validations,
            "frauds": frauds,
            "now": self._clock(),
        }
        self._writer.execute(_COUNT, values)
