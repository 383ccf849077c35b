"""Compares the files of members, fleet and receiver, without the code that wrote them.

Every server must have ended, apart from PostgreSQL.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import URL, Connection, Row, create_engine, text

from endurance import files
from endurance.files import Delivered, Received
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
Nonce = tuple[str, int]


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


@dataclass(frozen=True, slots=True)
class FleetAccount:
    """The comparison. A proof is a nonce of a round with its vector or distance.

    ``lanes_twice`` lanes were given twice, or proved by two rounds of members; ``proved_twice``
    nonces are in two members' rounds. Of the members' ``produced`` proofs ``lost`` are not stored,
    and ``altered`` are stored with another value. ``stored_twice`` nonces are stored more than
    once, ``foreign`` ones are of no member, ``outside`` ones not of their lane. ``gaps`` counts
    lanes that lack a nonce before their last. ``not_received`` stored proofs are not at the
    receiver, ``unknown`` ones only there; ``duplicates`` nonces came to it in callbacks of two
    keys, ``repeats`` callbacks twice under one. ``keys`` counts callbacks that one side has and the
    other has not, and missing sequence numbers. ``leftovers`` rows are undelivered or open.
    """

    rounds: int
    lanes: int
    produced: int
    lanes_twice: int
    proved_twice: int
    lost: int
    altered: int
    stored_twice: int
    foreign: int
    outside: int
    gaps: int
    not_received: int
    unknown: int
    duplicates: int
    repeats: int
    keys: int
    leftovers: int
    damaged: int


def read_fleet(database: URL) -> FleetFile:
    """Read the fleet's database."""
    engine = create_engine(database)
    try:
        with engine.connect() as connection:
            return _read(connection)
    finally:
        engine.dispose()


def account(
    fleet: FleetFile, outboxes: Iterable[Path], receiver_file: Path, url: str
) -> FleetAccount:
    """Compare; ``url`` is the address at which members reach the fleet."""
    members = [files.delivered(outbox, url) for outbox in outboxes]
    theirs = files.received(receiver_file)
    proved = _proved(members)
    stored = {(proof.round_id, proof.nonce): proof.value for proof in fleet.proofs}
    sent = {(fleet.blocks[p.round_id], p.nonce, p.value) for p in fleet.proofs}
    own = dict(proved)
    return FleetAccount(
        rounds=len(fleet.blocks),
        lanes=len(fleet.lanes),
        produced=len(proved),
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
        keys=_wrong_keys(fleet, theirs),
        leftovers=fleet.leftovers + sum(each.leftovers for each in members),
        damaged=len(theirs.damaged) + sum(len(each.damaged) for each in members),
    )


def _read(connection: Connection) -> FleetFile:
    deliveries = connection.execute(text(_DELIVERIES)).all()
    undelivered = sum(row.state != "done" for row in deliveries)
    return FleetFile(
        proofs=[p for row in connection.execute(text(_BATCHES)) for p in _proofs(row)],
        lanes=[((row.id, row.lane), row.member) for row in connection.execute(text(_LANES))],
        blocks={row.id: _block_hash(row.spec) for row in connection.execute(text(_ROUNDS))},
        keys=frozenset(row.idempotency_key for row in deliveries if row.state == "done"),
        sequences=[row.sequence for row in deliveries],
        leftovers=undelivered + connection.execute(text(_UNCUT)).scalar_one(),
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


def _block_hash(spec: str) -> str:
    return str(json.loads(spec)["work"]["block"]["hash"])


def _place(url: str) -> LanePlace:
    """The lane of a callback URL that a controller has made."""
    _, round_id, lane = url.rsplit("/", 2)
    return round_id, int(lane)


def _proved(members: Iterable[Delivered]) -> list[tuple[Nonce, str | float]]:
    """The members' proofs by the fleet's round and the nonce."""
    return [
        ((_place(each.rounds[round_id])[0], nonce), value)
        for each in members
        for round_id, nonce, value in each.proofs
    ]


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


def _wrong_keys(fleet: FleetFile, theirs: Received) -> int:
    missing = set(range(1, len(fleet.sequences) + 1)) - set(fleet.sequences)
    return len(fleet.keys ^ theirs.keys) + len(missing)
