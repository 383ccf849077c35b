"""The ledger of a validator: each challenge, what was answered, the verdict, and alpha spent.

One SQLite file. What was asked is there before it is sent, and an answer before it is judged: a
killed validator goes on where it was, and nothing is asked or judged twice.
"""

import fcntl
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult, share_of_alpha
from proofserve.remote.node_client import Unproved
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.verifier.challenge import FreshChallenge, fresh, nonces_of

YEAR_S: Final = 365 * 86_400.0
# "proofval" and the version, so that no other program's file is taken for a ledger.
_APPLICATION, _VERSION = 0x7076_616C, 1
_BUSY_S = 10.0
# A challenge without ``outcome`` is open: not answered yet, or not judged. One is ``told`` once a
# run has ended that said its outcome.
_SCHEMA = f"""
    CREATE TABLE rounds (
        number INTEGER PRIMARY KEY, model TEXT NOT NULL, work TEXT NOT NULL,
        nonces INTEGER NOT NULL, seed TEXT NOT NULL, asked_at REAL NOT NULL
    ) STRICT;
    CREATE TABLE challenges (
        number INTEGER PRIMARY KEY, round INTEGER NOT NULL REFERENCES rounds,
        node TEXT NOT NULL, url TEXT NOT NULL, public_key TEXT NOT NULL, alpha REAL NOT NULL,
        answers TEXT, seconds REAL,
        outcome TEXT, kind TEXT, reason TEXT, report TEXT, ended_at REAL,
        told INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE UNIQUE INDEX one_open ON challenges (node) WHERE outcome IS NULL;
    CREATE INDEX untold ON challenges (number) WHERE NOT told;
    CREATE INDEX of_node ON challenges (node);
    PRAGMA application_id = {_APPLICATION};
    PRAGMA user_version = {_VERSION};
"""
_OPEN = """
    SELECT c.number, node, url, public_key, alpha, answers, model, work, nonces, seed, asked_at
    FROM challenges c JOIN rounds r ON r.number = round WHERE outcome IS NULL ORDER BY c.number
"""
# What is not judged spends nothing, and an open challenge may still be judged.
_SPENT = """
    SELECT coalesce(sum(alpha), 0.0), count(*) FROM challenges c JOIN rounds r ON r.number = round
    WHERE node = ? AND asked_at > ? AND outcome IS NOT 'unproved'
"""
_UNTOLD = """
    SELECT node, model, outcome, reason, kind
    FROM challenges c JOIN rounds r ON r.number = round
    WHERE NOT told AND outcome IS NOT NULL ORDER BY c.number
"""
_NEWEST = """
    SELECT node, outcome, kind, reason, asked_at, ended_at, max(c.number)
    FROM challenges c JOIN rounds r ON r.number = round WHERE outcome IS NOT NULL GROUP BY node
"""


@dataclass(frozen=True, slots=True)
class OpenChallenge:
    """A challenge of ``node`` without an outcome; ``answers`` is the text that came, if it did.

    ``alpha`` is the chance that its verdict convicts an honest node, ``seed`` draws the sample.
    ``asked_at`` is Unix time.
    """

    number: int
    node: str
    url: str
    model: str
    challenge: FreshChallenge
    seed: str
    alpha: float
    asked_at: float
    answers: str | None


@dataclass(frozen=True, slots=True)
class NodeResult:
    """What was found about a node; ``outcome`` is None if its answer could not be judged yet.

    ``kind`` says why it is unproved.
    """

    node: str
    model: str
    outcome: SequentialResult | None
    reason: str
    kind: Unproved | None = None


@dataclass(frozen=True, slots=True)
class LedgerStanding:
    """What the ledger says of a node: how often each outcome, and the newest one, in Unix time."""

    counts: Mapping[str, int]
    alpha_spent: float
    outcome: str | None = None
    kind: str | None = None
    reason: str | None = None
    asked_at: float | None = None
    ended_at: float | None = None


class Ledger:
    """An open ledger. Every method is one transaction; they raise ReportedError if SQLite fails."""

    def __init__(self, path: Path, file: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._path = path
        self._file = file
        self._clock = clock

    @classmethod
    @contextmanager
    def opened(cls, path: Path, clock: Callable[[], float] = time.time) -> Iterator[Self]:
        """Open the file, or make it.

        Raises ReportedError if another validator uses it, or no ledger.
        """
        with ExitStack() as stack, _named(path):
            lock = stack.enter_context(path.with_name(f"{path.name}.lock").open("ab"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"ledger: another `proofserve validate` uses {path}: wait for its end"
                raise ReportedError(text) from None
            connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            file = stack.enter_context(closing(connection))
            if not file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                file.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT")
            names = ("application_id", "user_version")
            found = tuple(file.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
            if found != (_APPLICATION, _VERSION):
                raise ReportedError(f"ledger: {path} is no ledger of this version of proofserve")
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                file.execute(f"PRAGMA {setting}")
            opened = stack.pop_all()
        with opened:
            yield cls(path, file, clock)

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with _named(self._path):
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield self._file
                self._file.execute("COMMIT")
            finally:
                if self._file.in_transaction:
                    self._file.execute("ROLLBACK")

    def begin(
        self,
        model: str,
        shape: Work,
        nonces: int,
        nodes: Mapping[str, str],
        spending: tuple[float, float],
    ) -> None:
        """Write down challenges of ``nodes``, URLs by name, all of one new block.

        ``spending`` is the alpha of a year for each node, and the seconds between two challenges:
        each verdict gets its share of the year now. A node that has spent its alpha is left out.
        """
        now, (alpha, every_s) = self._clock(), spending
        asked = fresh(shape, nonces)
        with self._writing() as file:
            row = (model, json.dumps(asdict(asked.work)), nonces, fresh_seed(), now)
            made = "INSERT INTO rounds (model, work, nonces, seed, asked_at) VALUES (?, ?, ?, ?, ?)"
            number = file.execute(made, row).lastrowid
            for place, (node, url) in enumerate(nodes.items()):
                spent, judged = file.execute(_SPENT, (node, now - YEAR_S)).fetchone()
                share = share_of_alpha(spent / alpha, judged, int(YEAR_S / every_s))
                if share > 0.0:
                    # Of one block each node has a key of its own, so no answer can be another's.
                    key = f"{asked.work.public_key} {place}"
                    file.execute(
                        "INSERT INTO challenges (round, node, url, public_key, alpha)"
                        " VALUES (?, ?, ?, ?, ?)",
                        (number, node, url, key, share * alpha),
                    )

    def open_challenges(self) -> list[OpenChallenge]:
        with _named(self._path):
            rows = self._file.execute(_OPEN).fetchall()
        found = []
        for number, node, url, key, alpha, answers, model, work, nonces, seed, asked_at in rows:
            order = Work(**{**json.loads(work), "public_key": key})
            asked = FreshChallenge(order, nonces_of(order.block_hash, nonces))
            about = node, url, model, asked, seed, alpha, asked_at, answers
            found.append(OpenChallenge(number, *about))
        return found

    def answered(self, number: int, answers: str, seconds: float) -> None:
        self._change(number, {"answers": answers, "seconds": seconds}, "answers IS NULL")

    def unproved(self, number: int, kind: Unproved, reason: str, seconds: float | None) -> None:
        outcome = SequentialResult.UNPROVED
        ended: dict[str, Any] = {"outcome": outcome, "kind": kind, "reason": reason}
        if seconds is not None:
            ended["seconds"] = seconds
        self._change(number, {**ended, "ended_at": self._clock()})

    def judged(
        self, number: int, verdict: SequentialResult, reason: str, report: Mapping[str, Any]
    ) -> None:
        """Keep a verdict; of one that is not honest with its report and the answers."""
        ended: dict[str, Any] = {"outcome": verdict, "reason": reason, "ended_at": self._clock()}
        if verdict is SequentialResult.HONEST:
            ended["answers"] = None
        else:
            ended["report"] = json.dumps(report, default=str)
        self._change(number, ended, "answers IS NOT NULL")

    def _change(self, number: int, values: Mapping[str, Any], condition: str = "true") -> None:
        """Raises ReportedError, and changes nothing, unless the challenge is open."""
        names = ", ".join(f"{name} = :{name}" for name in values)
        where = f"number = :number AND outcome IS NULL AND {condition}"
        change = f"UPDATE challenges SET {names} WHERE {where}"  # noqa: S608 - our own names
        with self._writing() as file:
            done = file.execute(change, {**values, "number": number})
            if done.rowcount != 1:
                raise ReportedError(f"ledger: challenge {number} was ended before")

    def untold(self) -> list[NodeResult]:
        """What ended since the last run that came to its end, this one's included."""
        with _named(self._path):
            rows = self._file.execute(_UNTOLD).fetchall()
        return [
            NodeResult(node, model, SequentialResult(outcome), reason, kind and Unproved(kind))
            for node, model, outcome, reason, kind in rows
        ]

    def tell(self) -> None:
        """Note that all is told."""
        with self._writing() as file:
            file.execute("UPDATE challenges SET told = 1 WHERE NOT told AND outcome IS NOT NULL")

    def standings(self, nodes: Sequence[str]) -> dict[str, LedgerStanding]:
        """Of the ``nodes``, and alpha spent in the year up to now."""
        counted = "SELECT node, outcome, count(*) FROM challenges WHERE outcome IS NOT NULL"
        with _named(self._path):
            counts = self._file.execute(f"{counted} GROUP BY node, outcome").fetchall()
            newest = {row[0]: row[1:-1] for row in self._file.execute(_NEWEST)}
            since = self._clock() - YEAR_S
            spent = {n: self._file.execute(_SPENT, (n, since)).fetchone()[0] for n in nodes}
        return {
            name: LedgerStanding(
                {outcome: n for node, outcome, n in counts if node == name},
                spent[name],
                *newest.get(name, ()),
            )
            for name in nodes
        }


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise ReportedError(f"ledger: {path}: {error}") from error
