"""Vectors under roots that a node posted: the node opens a sample, and every path is checked."""

import base64
import binascii
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from proofserve.protocol.commitments import CommittedBatch, leaf, opens
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane, draw
from proofserve.protocol.verdict.comparison import Claim, Mismatch, Reason
from proofserve.receiver.reader import ReceivedRound, is_database, reading
from proofserve.remote.node_client import (
    NodeClient,
    Unproved,
    UnprovedError,
    Withheld,
    owed_by,
    unproved_by,
)
from proofserve.reports import NodeError, Progress, ReportedError, read_json
from proofserve.verifier.claims import ClaimedArtifacts, Selection, readable
from proofserve.wire.records import CommittedRoots, OpeningRecord

T = TypeVar("T")

# Nonces of a sample, if the user does not say how many.
SAMPLE: Final = 1000
# Nonces of one request: few enough for an answer within seconds.
AT_ONCE: Final = 100
# So many nonces that the node does not open show that it will not: no more are asked for.
ENOUGH_FAULTS: Final = 32
# How long a node may be unreachable or too busy, all times together, and a pause between tries.
PATIENCE_S, PAUSE_S = 60.0, 1.0
# With these a node says that it does not have one of the vectors.
_HAS_NOT = (404, 409, 410)
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500


_first_index = attrgetter("first_index")


@dataclass(frozen=True, slots=True)
class CommittedSource:
    """The roots of one round, which are put in order; ``width`` counts the values per nonce.

    Raises ReportedError for a round without roots, and UnprovedError for batches that overlap.
    """

    round_id: str
    block: Block
    public_key: str
    lane: NonceLane
    scheme: str
    width: int
    seq_len: int
    batches: tuple[CommittedBatch, ...]

    def __post_init__(self) -> None:
        if not self.batches:
            raise ReportedError(f"round {self.round_id} has no roots")
        object.__setattr__(self, "batches", tuple(sorted(self.batches, key=_first_index)))
        for one, after in pairwise(self.batches):
            if one.first_index + one.count > after.first_index:
                text = f"two roots cover lane index {after.first_index}"
                raise UnprovedError(Unproved.OVERLAPPING, text)

    def nonces(self) -> Iterator[int]:
        for batch in self.batches:
            yield from self.lane.batch(batch.first_index, batch.count)

    def place_of(self, nonce: int) -> tuple[CommittedBatch, int]:
        """The batch of one of ``nonces()``, and its place there."""
        if (index := self.lane.index_of(nonce)) is None:
            raise ValueError(f"nonce {nonce} is of another lane")
        batch = self.batches[bisect_right(self.batches, index, key=_first_index) - 1]
        return batch, index - batch.first_index

    def withheld(self) -> Withheld | None:
        """Between the first root and the last: nonces without a root."""
        behind = sum(b.first_index - a.first_index - a.count for a, b in pairwise(self.batches))
        if not behind:
            return None
        how = "have the node's operator run `proofserve outbox retry --expired`"
        text = f"the roots of {behind} nonces of the lane, between others that came; {how}"
        return Withheld(Unproved.UNDELIVERED, text)

    def broken_links(self) -> dict[int, Mismatch]:
        """Batches that do not name the root before them, each by its first nonce."""
        broken = {}
        for one, after in pairwise(self.batches):
            follows = one.first_index + one.count == after.first_index
            if follows and after.previous_root != one.root:
                nonce = self.lane.nonce(after.first_index)
                detail = f"the batch at lane index {after.first_index} names another root before it"
                broken[nonce] = Mismatch(nonce, Reason.NOT_COMMITTED, detail=detail)
        return broken

    def checked(self, opened: OpeningRecord) -> Claim | Mismatch:
        """The claim about a nonce, if its path leads to the root that we have of its batch."""
        batch, place = self.place_of(opened.nonce)
        try:
            hashed = leaf(opened.nonce, base64.b64decode(opened.vector_b64, validate=True))
        except (binascii.Error, ValueError):
            hashed = b""
        if opens(batch.root, batch.count, place, hashed, opened.path):
            return Claim(opened.nonce, opened.vector_b64)
        detail = f"its path does not lead to the root of lane index {batch.first_index}"
        return Mismatch(opened.nonce, Reason.NOT_COMMITTED, detail=detail)


def read_committed(path: Path, wanted: Selection, round_id: str | None) -> CommittedSource:
    """Of a JSON file, or of the SQLite file of ``proofserve receive``. Raises ReportedError."""
    with readable(path):
        if is_database(path):
            return _from_receiver(path, wanted, round_id)
        return committed_from_file(path, wanted)


def committed_from_file(path: Path, wanted: Selection) -> CommittedSource:
    """The roots in a JSON file, which has the form of a callback. Raises ReportedError."""
    read = read_json(path, CommittedRoots)
    wanted.require(path, read.block_hash, read.public_key)
    batches = (each.batch for each in read.roots)
    return _source(read, read.encoding.k_dim, read.params.seq_len, batches, wanted)


def _from_receiver(path: Path, wanted: Selection, round_id: str | None) -> CommittedSource:
    with reading(path) as received:
        rounds = received.rounds()
        held = {r.round_id: r for r in rounds if wanted.fits(r.block_hash, r.public_key)}
        fitting = [each for name, each in held.items() if round_id in {None, name}]
        if len(fitting) != 1:
            said = (f"{n}: block {r.block_hash}, key {r.public_key}" for n, r in held.items())
            listed = "\n".join(f"  {each}" for each in said)
            problem = "several rounds with roots fit" if fitting else "no round with roots fits"
            raise ReportedError(f"{path}: {problem}; choose by --round-id from\n{listed}")
        (found,) = fitting
        return _source(found, found.width, found.seq_len, received.batches(found.number), wanted)


def _source(
    of: CommittedRoots | ReceivedRound,
    width: int,
    seq_len: int,
    batches: Iterable[CommittedBatch],
    wanted: Selection,
) -> CommittedSource:
    if wanted.lane not in {None, of.lane}:
        raise ReportedError(f"--lane: the roots are of {of.lane}")
    block = Block(of.block_hash, of.block_height)
    about = of.round_id, block, of.public_key, of.lane, of.scheme, width, seq_len
    return CommittedSource(*about, tuple(batches))


@dataclass(slots=True)
class _Opener:
    node: NodeClient
    source: CommittedSource
    patience_s: float
    claims: list[Claim] = field(default_factory=list)
    faults: dict[int, Mismatch] = field(default_factory=dict)
    unopened: dict[int, Withheld] = field(default_factory=dict)
    waited_s: float = 0.0

    def ask(self, nonces: Sequence[int]) -> None:
        """Have ``nonces`` opened. Each gives a claim or a fault, or stays unopened."""
        source = self.source
        about = source.block.hash, source.public_key, source.round_id
        try:
            self._take(nonces, self.patiently(lambda: self.node.open_vectors(*about, nonces)))
        except NodeError as error:
            if error.status in _HAS_NOT and len(nonces) > 1:
                # The node refuses all for one that it does not have: find that one.
                half = len(nonces) // 2
                self.ask(nonces[:half])
                self.ask(nonces[half:])
            else:
                why = unproved_by(error)
                self.unopened |= dict.fromkeys(nonces, Withheld(why.kind, str(why)))

    def patiently(self, call: Callable[[], T]) -> T:
        """The answer; a node may be away for ``patience_s`` in all. Raises NodeError."""
        while True:
            began = time.monotonic()
            try:
                return call()
            except NodeError as error:
                self.waited_s += time.monotonic() - began
                if not _is_passing(error) or self.waited_s >= self.patience_s:
                    raise
                time.sleep(PAUSE_S)
                self.waited_s += PAUSE_S

    def _take(self, nonces: Sequence[int], answer: Sequence[Any]) -> None:
        opened: dict[int, OpeningRecord] = {}
        for each in answer:
            # The nonce of a record that is none is then without an opening.
            with suppress(ValidationError):
                record = OpeningRecord.model_validate(each)
                opened.setdefault(record.nonce, record)
        for nonce in nonces:
            if nonce not in opened:
                text = "the answer has no such opening"
                self.unopened[nonce] = Withheld(Unproved.UNREADABLE, text)
            elif isinstance(found := self.source.checked(opened[nonce]), Claim):
                self.claims.append(found)
            else:
                self.faults[nonce] = found

    def withheld(self, asked: int) -> Withheld | None:
        if not self.unopened:
            return None
        why = next(iter(self.unopened.values()))
        text = f"{len(self.unopened)} of {asked} drawn nonces are not opened: {why.text}"
        return Withheld(why.kind, text)


def open_sample(
    source: CommittedSource,
    node: NodeClient,
    seed: str,
    most: int,
    progress: Progress,
    patience_s: float = PATIENCE_S,
) -> ClaimedArtifacts:
    """Have ``node`` open up to ``most`` nonces that ``seed`` draws, and check every path.

    The claims are of vectors that fit their roots, ``faults`` has those that do not. A node that
    refuses, or cannot be reached for longer than ``patience_s`` seconds, has not opened: the rest
    of the drawn nonces is withheld, whatever the cause. Raises UnprovedError if nothing was opened.
    """
    drawn = draw(source.nonces(), seed, most)
    progress.step(f"{node.url} opens up to {len(drawn)} nonces")
    opener, asked = _Opener(node, source, patience_s), 0
    with owed_by(node.url):
        digest = opener.patiently(node.weights_digest)
    while asked < len(drawn) and len(opener.faults) + len(opener.unopened) < ENOUGH_FAULTS:
        opener.ask(drawn[asked : asked + AT_ONCE])
        asked = min(asked + AT_ONCE, len(drawn))
    faults, withheld = source.broken_links() | opener.faults, opener.withheld(asked)
    if withheld and not opener.claims and not faults:
        raise UnprovedError(withheld.kind, withheld.text)
    return ClaimedArtifacts(
        block_hash=source.block.hash,
        public_key=source.public_key,
        nonces=tuple(nonce for nonce in drawn[:asked] if nonce not in opener.unopened),
        claims=tuple(opener.claims),
        width=source.width,
        seq_len=source.seq_len,
        scheme=source.scheme,
        block_height=source.block.height,
        weights_digest=digest,
        faults=faults,
        withheld=withheld or source.withheld(),
    )


def _is_passing(error: NodeError) -> bool:
    """Whether the same request may succeed later: no answer, too many requests, a fault."""
    status = error.status
    return status is None or status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR
