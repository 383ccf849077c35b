"""Roots that a receiver stored, for a validator that has the node open them."""

from dataclasses import dataclass
from pathlib import Path

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts, Selection
from proofserve.lab.verify.opening import (
    SAMPLE,
    CommittedSource,
    Patience,
    committed_from_file,
    only_round,
    open_sample,
)
from proofserve.protocol.identity import Block
from proofserve.receiver import reader
from proofserve.receiver.reader import ReceiverFileError


@dataclass(frozen=True, slots=True)
class OpeningOptions:
    """The node that posted the roots, and how many nonces it shall open; None for a default."""

    url: str
    api_key: str | None = None
    round_id: str | None = None
    nonces: int | None = None


def opened_claims(
    path: Path, wanted: Selection, options: OpeningOptions, seed: str, progress: Progress
) -> ClaimedArtifacts:
    """What a node opens of the roots in ``path``; see ``open_sample``. Raises LabError."""
    source = read_committed(path, wanted, options.round_id)
    patience = Patience()
    with NodeClient(options.url, options.api_key, timeout_s=patience.seconds) as node:
        return open_sample(source, node, seed, options.nonces or SAMPLE, progress, patience)


def read_committed(path: Path, wanted: Selection, round_id: str | None) -> CommittedSource:
    """The roots of one round in a JSON file, or in the SQLite file of ``proofserve receive``.

    Raises LabError naming what is wrong with the file.
    """
    try:
        if reader.is_database(path):
            return _from_receiver(path, wanted, round_id)
        return committed_from_file(path, wanted)
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    except ReceiverFileError as error:
        raise LabError(str(error)) from error


def _from_receiver(path: Path, wanted: Selection, round_id: str | None) -> CommittedSource:
    with reader.reading(path) as received:
        rounds = {
            each.round_id: each
            for each in received.rounds()
            if wanted.fits(each.block_hash, each.public_key)
        }
        held = {each: f"block {r.block_hash}, key {r.public_key}" for each, r in rounds.items()}
        found = rounds[only_round(path, held, round_id)]
        batches = tuple(received.batches(found.number))
    return CommittedSource(
        round_id=found.round_id,
        block=Block(found.block_hash, found.block_height),
        public_key=found.public_key,
        lane=found.lane,
        scheme=found.scheme,
        width=found.width,
        seq_len=found.seq_len,
        batches=batches,
    )
