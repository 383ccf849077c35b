"""Stores received callbacks in the receiver's file, and sums the file up."""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from rich.table import Table

from proofserve.protocol.receipts.record import SignedEntry
from proofserve.receiver.callbacks import Generated, GeneratedWinners, Validated, ValidatedDistances
from proofserve.receiver.reader import ReceiverFileError, connect
from proofserve.wire import LOGGED
from proofserve.wire.records import CommittedRoots, WorkRecord
from proofserve.wire.signed import signed_entry_body

_log = logging.getLogger(__name__)

# What one callback adds to its source; ``received`` counts the duplicates too.
_COUNT = """
    INSERT INTO sources (public_key, block_hash, received, artifacts, winners, committed,
                         validations, frauds, last_received)
    VALUES (:public_key, :block_hash, :received, :artifacts, :winners, :committed,
            :validations, :frauds, :now)
    ON CONFLICT DO UPDATE SET
        received = received + excluded.received,
        artifacts = artifacts + excluded.artifacts, winners = winners + excluded.winners,
        committed = committed + excluded.committed,
        validations = validations + excluded.validations, frauds = frauds + excluded.frauds,
        last_received = max(last_received, excluded.last_received)
"""
_ADD_FOUND = "INSERT INTO {} VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
# What the first callback of a round says of it stays.
_ADD_ROUND = """
    INSERT INTO committed_rounds VALUES (
        NULL, :block_hash, :public_key, :round_id, :block_height, :node_id, :node_count, :group_id,
        :n_groups, :scheme, :k_dim, :seq_len)
    ON CONFLICT DO UPDATE SET scheme = scheme RETURNING number
"""
_ADD_ROOT = "INSERT INTO roots VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
_ADD_VALIDATION = """
    INSERT INTO validations VALUES (
        NULL, :callback, :request_id, :public_key, :block_hash, :block_height, :node_id,
        :n_total, :n_mismatch, :mismatch_nonces, :p_value, :fraud_detected)
"""
_ADD_DISTANCE_VALIDATION = """
    INSERT INTO distance_validations VALUES (
        NULL, :callback, :public_key, :block_hash, :block_height, :nonces, :computed_distances,
        :received_distances, :valid, :n_invalid, :probability_honest, :fraud_detected)
"""
_ADD_ENTRY = """
    INSERT INTO log_entries VALUES (
        :public_key, :number, :hash, :body, :now,
        EXISTS (SELECT 1 FROM log_entries WHERE public_key = :public_key AND number = :number))
    ON CONFLICT DO NOTHING RETURNING fork
"""
_TOTALS = "SELECT count(*), coalesce(sum(repeats), 0), max(received_at) FROM callbacks"
_SOURCES = """
    SELECT public_key, block_hash, artifacts, winners, received - artifacts - winners - committed,
           validations, frauds, last_received, committed
    FROM sources ORDER BY last_received DESC, public_key, block_hash
"""
_FORKS = "SELECT count(*) FROM log_entries WHERE fork = 1"


@dataclass(frozen=True, slots=True)
class ClaimSource:
    """One public key in one block.

    ``artifacts`` and ``winners`` count distinct nonces of the two protocols, ``committed`` nonces
    under roots, ``duplicates`` nonces that came again in another callback; ``validations`` and
    ``frauds`` count both protocols. ``last_received`` in seconds since the epoch.
    """

    public_key: str
    block_hash: str
    artifacts: int
    winners: int
    duplicates: int
    validations: int
    frauds: int
    last_received: float
    committed: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The whole file, newest source first; ``repeats`` counts callbacks that came again.

    ``forks`` counts entries of logs of receipts that came beside another one with their index.
    """

    callbacks: int
    repeats: int
    last_received: float | None
    sources: tuple[ClaimSource, ...]
    forks: int = 0


class ReceiverStore:
    """Stores and counts callbacks; any thread may call it. Raises sqlite3.Error.

    ``key`` and ``sequence`` are in the headers of a callback; other senders have none.
    """

    def __init__(
        self, writer: sqlite3.Connection, reader: sqlite3.Connection, clock: Callable[[], float]
    ) -> None:
        # Two connections: reading the summary never waits for a large callback.
        self._writer = writer
        self._reader = reader
        self._clock = clock
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    @classmethod
    def open(cls, path: Path, clock: Callable[[], float] = time.time) -> Self:
        """Open or create the file; ``clock`` gives wall-clock seconds. Raises ReceiverFileError."""
        writer = connect(path)
        try:
            return cls(writer, connect(path), clock)
        except ReceiverFileError:
            writer.close()
            raise

    def close(self) -> None:
        with self._writing, self._reading:
            self._reader.close()
            self._writer.close()

    def add_generated(
        self,
        body: Generated | GeneratedWinners | CommittedRoots,
        key: str | None = None,
        sequence: int | None = None,
    ) -> bool:
        """Store artifacts, winners or roots. False, and no change, if this callback came before.

        The first value of a nonce and the first root of a batch stay; later ones are counted.
        """
        with self._writing, self._writer:
            callback = self._enter("generated", key, sequence)
            if callback is None:
                return False
            if isinstance(body, CommittedRoots):
                self._add_roots(body, callback)
                return True
            values: Iterable[tuple[int, str | float]]
            if isinstance(body, Generated):
                kind, values = "artifacts", ((one.nonce, one.vector_b64) for one in body.artifacts)
            else:
                kind, values = "winners", zip(body.nonces, body.dist, strict=True)
            rows = [(body.block_hash, body.public_key, *pair, callback) for pair in values]
            # rowcount is -1 for an empty list.
            stored = max(self._writer.executemany(_ADD_FOUND.format(kind), rows).rowcount, 0)
            self._count(body, received=len(rows), **{kind: stored})
            return True

    def add_validated(
        self,
        body: Validated | ValidatedDistances,
        key: str | None = None,
        sequence: int | None = None,
    ) -> bool:
        with self._writing, self._writer:
            callback = self._enter("validated", key, sequence)
            if callback is None:
                return False
            statement = _ADD_VALIDATION if isinstance(body, Validated) else _ADD_DISTANCE_VALIDATION
            # A list goes into one column.
            values = {
                name: json.dumps(value) if isinstance(value, list) else value
                for name, value in body.model_dump().items()
            }
            self._writer.execute(statement, values | {"callback": callback})
            self._count(body, validations=1, frauds=int(body.fraud_detected))
            return True

    def add_logged(
        self,
        public_key: bytes,
        entries: Sequence[SignedEntry],
        key: str | None = None,
        sequence: int | None = None,
    ) -> bool:
        """Store entries of a node's log, whose signatures the caller has checked.

        One beside another entry with its index is stored, too, because both together prove that the
        node shows different logs. False as ``add_generated``.
        """
        with self._writing, self._writer:
            if self._enter(LOGGED, key, sequence) is None:
                return False
            forks, now = [], self._clock()
            for each in entries:
                row = {
                    "public_key": public_key.hex(),
                    "number": each.entry.index,
                    "hash": each.entry.hash,
                    "body": json.dumps(signed_entry_body(each)),
                    "now": now,
                }
                if self._writer.execute(_ADD_ENTRY, row).fetchone() == (1,):
                    forks.append(each.entry.index)
        for index in forks:
            _log.error(
                "the log of receipts of %s forks: it has another entry %d", public_key.hex(), index
            )
        return True

    def _add_roots(self, body: CommittedRoots, callback: int) -> None:
        values = {**dict(body), "k_dim": body.encoding.k_dim, "seq_len": body.params.seq_len}
        (number,) = self._writer.execute(_ADD_ROUND, values).fetchone()
        stored = 0
        for batch in body.roots:
            row = (number, batch.first_index, batch.count, batch.root, batch.previous_root)
            if self._writer.execute(_ADD_ROOT, (*row, callback)).rowcount:
                stored += batch.count
        self._count(body, received=sum(one.count for one in body.roots), committed=stored)

    def summary(self) -> Summary:
        with self._reading, self._reader:
            self._reader.execute("BEGIN")
            callbacks, repeats, last_received = self._reader.execute(_TOTALS).fetchone()
            sources = tuple(ClaimSource(*row) for row in self._reader.execute(_SOURCES))
            (forks,) = self._reader.execute(_FORKS).fetchone()
        return Summary(callbacks, repeats, last_received, sources, forks)

    def _enter(self, endpoint: str, key: str | None, sequence: int | None) -> int | None:
        self._writer.execute("BEGIN IMMEDIATE")
        number, repeats = self._writer.execute(
            "INSERT INTO callbacks (endpoint, idempotency_key, sequence, received_at)"
            " VALUES (?, ?, ?, ?)"
            " ON CONFLICT (idempotency_key) DO UPDATE SET repeats = repeats + 1"
            " RETURNING id, repeats",
            (endpoint, key, sequence, self._clock()),
        ).fetchone()
        return None if repeats else int(number)

    def _count(self, body: WorkRecord, **added: int) -> None:
        names = ("received", "artifacts", "winners", "committed", "validations", "frauds")
        source = {"public_key": body.public_key, "block_hash": body.block_hash}
        self._writer.execute(
            _COUNT, dict.fromkeys(names, 0) | added | source | {"now": self._clock()}
        )


def render(summary: Summary) -> Table:
    """A table of sources, the newest first; times in UTC."""
    # Padding on one side only leaves room for the keys on a terminal of 80 columns.
    table = Table(
        title=_title(summary),
        title_style="bold red" if summary.forks else None,
        title_justify="left",
        expand=True,
        padding=(0, 1, 0, 0),
    )
    # Keys and hashes share the rest of the width and may be cut: their beginnings identify them.
    for name in ("public key", "block"):
        table.add_column(name, ratio=1, overflow="ellipsis", no_wrap=True)
    # A terminal of 80 columns has no room for all: these two only if a source has some.
    rare = [n for n in ("winners", "committed") if any(getattr(s, n) for s in summary.sources)]
    shown = ("artifacts", *rare, "duplicates", "validations", "frauds")
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("last", no_wrap=True)
    for source in summary.sources:
        counts = [f"{getattr(source, name):,}" for name in shown]
        table.add_row(
            source.public_key,
            source.block_hash,
            *counts,
            _time(source.last_received),
            style="red" if source.frauds else "",
        )
    return table


def _title(summary: Summary) -> str:
    if summary.last_received is None:
        return "nothing received yet"
    forks = f", {summary.forks:,} forks in logs of receipts" if summary.forks else ""
    return (
        f"{summary.callbacks:,} callbacks, {summary.repeats:,} repeated, "
        f"last at {_time(summary.last_received)} UTC{forks}"
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")
