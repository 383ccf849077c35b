"""What a source says about its artifacts, and what the options say: they must not contradict."""

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from proofserve.lab.client.errors import LabError
from proofserve.lab.verify.claimed import Claimed, Wanted, from_file, from_pairs, only_source
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.schemes import scheme as scheme_named
from proofserve.receiver import reader
from proofserve.receiver.database import ReceiverFileError
from proofserve.rounds.records import Workload

PLAIN = "artifact-v1"

T = TypeVar("T")


def read_file(path: Path, wanted: Wanted) -> Claimed:
    """The artifacts in a JSON file, or in the SQLite file of ``proofserve receive``.

    Raises LabError naming what is wrong with the file.
    """
    try:
        if not reader.is_database(path):
            return from_file(path, wanted)
        with reader.reading(path) as received:
            source = only_source(path, received.counts(), wanted)
            return from_pairs(source, received.of(source))
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    except ReceiverFileError as error:
        raise LabError(str(error)) from error


def completed(
    claimed: Claimed, seq_len: int | None, k_dim: int | None, scheme: str | None
) -> Claimed:
    """``claimed`` with whatever of the three it does not say itself; ``scheme`` is plain then.

    Raises LabError for a contradiction, and for a number that nobody says.
    """
    return replace(
        claimed,
        seq_len=_known("seq_len", claimed.seq_len, seq_len),
        k_dim=_known("k_dim", claimed.k_dim, k_dim),
        scheme=_agreed("scheme", claimed.scheme, scheme) or PLAIN,
    )


def workload(claimed: Claimed, stronger_rng: bool) -> Workload:
    """What a complete ``claimed`` asks an engine to compute. Raises LabError and ProtocolError."""
    name = claimed.scheme or PLAIN
    made_by = scheme_named(name, k_dim=claimed.k_dim, stronger_rng=stronger_rng)
    if not isinstance(made_by, ArtifactScheme):
        raise LabError(f"{name} has no artifacts; a node judges distances by /validate")
    return Workload(made_by, claimed.block_hash, claimed.public_key, claimed.seq_len or 0)


def _known(field: str, said: int | None, given: int | None) -> int:
    agreed = _agreed(field, said, given)
    if agreed is None:
        raise LabError(f"the source does not say {field}; give {_option(field)}")
    return agreed


def _agreed(field: str, said: T | None, given: T | None) -> T | None:
    if said is not None and given not in {None, said}:
        raise LabError(f"{_option(field)} {given} contradicts the source, which says {said}")
    return said if said is not None else given


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"
