"""Compares the files of members, fleet and receiver, without the code that wrote them.

Every server must have ended, apart from PostgreSQL.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import URL, Row, create_engine, text
from sqlalchemy.pool import NullPool

from endurance import files
from endurance.files import Delivered
from proofserve.reports import Figure, Limit
from proofserve.rounds.records import StoredResult

_BATCHES = """
    SELECT r.id, r.lanes, b.lane, b.kind, b.first_seq, b.count, b.nonces, b.found, b.row_bytes
    FROM fleet_batches b JOIN fleet_rounds r ON r.number = b.round ORDER BY b.number
"""
_LANES = """
    SELECT r.id, l.lane, l.member FROM fleet_lanes l JOIN fleet_rounds r ON r.number = l.round
"""
_ROUNDS = "SELECT id, spec FROM fleet_rounds"
_DELIVERIES = "SELECT idempotency_key, url, sequence, state FROM fleet_deliveries"
_UNCUT = "SELECT count(*) FROM fleet_rounds WHERE url IS NOT NULL AND last_batch > cut_batch"

# The fleet's id of a round, and the number of a lane.
LanePlace = tuple[str, int]


@dataclass(frozen=True, slots=True)
class StoredProof:
    """One result in the fleet's database. ``lanes`` is the number of lanes of its round."""

    seq: int
    round_id: str
    lanes: int
    lane: int
    nonce: int
    value: str | float

    @property
    def result(self) -> StoredResult:
        """The result as a controller shows it."""
        vector = self.value if isinstance(self.value, str) else None
        distance = self.value if isinstance(self.value, float) else None
        return StoredResult(self.seq, self.round_id, self.nonce, vector, None, distance)


@dataclass(frozen=True, slots=True)
class FleetFile:
    """The fleet's database. ``blocks`` has the block hash of each round.

    ``keys`` are those of callbacks that the receiver has acknowledged, ``sequences`` the sequence
    numbers of all callbacks to it. ``leftovers`` counts what was not delivered to it.
    """

    proofs: Sequence[StoredProof]
    lanes: Sequence[tuple[LanePlace, str]]
    blocks: dict[str, str]
    keys: frozenset[str]
    sequences: Sequence[int]
    leftovers: int


def counted(meaning: str) -> Any:
    """A field of an account: a number that has no limit."""
    return field(metadata={"meaning": meaning})


def zero(meaning: str) -> Any:
    """A field of an account: a number that must be 0."""
    return field(metadata={"meaning": meaning, "limit": Limit(0, at_most=True)})


def figures(account: Any, of_wrong: str = "") -> list[Figure]:
    """Those of the fields of an account; ``of_wrong`` begins the names of those with a limit."""
    made = []
    for each in fields(account):
        limit = each.metadata.get("limit")
        name = each.name if limit is None else f"{of_wrong}{each.name}"
        made.append(Figure(name, getattr(account, each.name), each.metadata["meaning"], limit))
    return made


@dataclass(frozen=True, slots=True)
class FleetAccount:
    """The comparison. A proof is a nonce of a round with its vector or distance."""

    rounds: int = counted("of both protocols in turn")
    lanes: int = counted("given")
    proofs: int = counted("artifacts and winners in the members' files")
    lanes_twice: int = zero("lanes given twice, or proved by two rounds of members")
    proved_twice: int = zero("nonces that two members proved")
    lost: int = zero("proofs of members that the fleet has not stored")
    altered: int = zero("proofs that are stored with another value")
    stored_twice: int = zero("nonces stored twice")
    foreign: int = zero("stored nonces that no member has proved")
    outside: int = zero("stored nonces of another lane")
    gaps: int = zero("lanes that lack a nonce before their last one")
    not_received: int = zero("stored proofs that the receiver has not")
    unknown: int = zero("proofs that only the receiver has")
    duplicates: int = zero("nonces that the receiver has from two callbacks")
    keys: int = zero("callbacks that one side has only, missing sequences")
    leftovers: int = zero("rows undelivered, or of a round without an end")
    damaged: int = zero("SQLite files in which SQLite's check finds faults")
    repeats: int = counted("callbacks that the receiver got twice under one key")


def read_fleet(database: URL) -> FleetFile:
    with create_engine(database, poolclass=NullPool).connect() as connection:
        deliveries = connection.execute(text(_DELIVERIES)).all()
        undelivered = sum(row.state != "done" for row in deliveries)
        rounds = connection.execute(text(_ROUNDS))
        return FleetFile(
            proofs=[p for row in connection.execute(text(_BATCHES)) for p in _proofs(row)],
            lanes=[((row.id, row.lane), row.member) for row in connection.execute(text(_LANES))],
            blocks={row.id: json.loads(row.spec)["work"]["block"]["hash"] for row in rounds},
            keys=frozenset(row.idempotency_key for row in deliveries if row.state == "done"),
            sequences=[row.sequence for row in deliveries],
            leftovers=undelivered + connection.execute(text(_UNCUT)).scalar_one(),
        )


def account(
    fleet: FleetFile, outboxes: Iterable[Path], receiver_file: Path, url: str
) -> FleetAccount:
    """Compare; ``url`` is the address at which members reach the fleet."""
    members = [files.delivered(outbox, url) for outbox in outboxes]
    theirs = files.received(receiver_file)
    # By the fleet's round and the nonce.
    proved = [
        ((_place(each.rounds[round_id])[0], nonce), value)
        for each in members
        for round_id, nonce, value in each.proofs
    ]
    stored = {(proof.round_id, proof.nonce): proof.value for proof in fleet.proofs}
    sent = {(fleet.blocks[p.round_id], p.nonce, p.value) for p in fleet.proofs}
    own, numbers = dict(proved), set(range(1, len(fleet.sequences) + 1))
    return FleetAccount(
        rounds=len(fleet.blocks),
        lanes=len(fleet.lanes),
        proofs=len(proved),
        lanes_twice=_lanes_twice(fleet, members),
        proved_twice=len(proved) - len(own),
        lost=len(own.keys() - stored.keys()),
        altered=sum(stored[nonce] != own[nonce] for nonce in own.keys() & stored.keys()),
        stored_twice=len(fleet.proofs) - len(stored),
        foreign=len(stored.keys() - own.keys()),
        outside=sum(proof.nonce % proof.lanes != proof.lane for proof in fleet.proofs),
        gaps=_gaps(fleet.proofs),
        not_received=len(sent - theirs.proofs),
        unknown=len(theirs.proofs - sent),
        duplicates=theirs.duplicates,
        repeats=theirs.repeats,
        keys=len(fleet.keys ^ theirs.keys) + len(numbers - set(fleet.sequences)),
        leftovers=fleet.leftovers + sum(each.leftovers for each in members),
        damaged=len(theirs.damaged) + sum(len(each.damaged) for each in members),
    )


def _proofs(row: Row[Any]) -> list[StoredProof]:
    """The results of one stored callback."""
    nonces: list[int] = np.frombuffer(row.nonces, "<i8").tolist()
    return [
        StoredProof(row.first_seq + place, row.id, row.lanes, row.lane, nonce, value)
        for place, (nonce, value) in enumerate(zip(nonces, _values(row), strict=True))
    ]


def _values(row: Row[Any]) -> Sequence[str | float]:
    """Vectors as the base64 of their float16 values, or distances."""
    if row.kind == "winners":
        distances: list[float] = np.frombuffer(row.found, "<f8").tolist()
        return distances
    width = row.row_bytes
    rows = (row.found[at : at + width] for at in range(0, len(row.found), width))
    return [base64.b64encode(each).decode() for each in rows]


def _place(url: str) -> LanePlace:
    """The lane of a callback URL that a controller has made."""
    _, round_id, lane = url.rsplit("/", 2)
    return round_id, int(lane)


def _lanes_twice(fleet: FleetFile, members: Iterable[Delivered]) -> int:
    given = Counter(place for place, _ in fleet.lanes)
    proved = Counter(_place(url) for each in members for url in each.rounds.values())
    return sum(count > 1 for count in (*given.values(), *proved.values()))


def _gaps(proofs: Iterable[StoredProof]) -> int:
    indices: dict[LanePlace, set[int]] = {}
    for proof in proofs:
        of_lane = indices.setdefault((proof.round_id, proof.lane), set())
        of_lane.add(proof.nonce // proof.lanes)
    return sum(len(found) != max(found) + 1 for found in indices.values())
