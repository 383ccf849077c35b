"""Artifacts that a prover published, from a file, a receiver or a node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, Field

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.report.json_files import read_json, write_json
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.protocol.schemes import scheme as scheme_named
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import Workload
from proofserve.wire.records import ArtifactRecord, VectorEncoding, artifact_record, encoding_of

# The scheme of a source that does not say one.
DEFAULT_SCHEME: Final = "artifact-v1"

T = TypeVar("T")
Nonce = Annotated[int, Field(strict=True, ge=0, le=MAX_NONCE)]
# A claim that is no text counts as an empty one, so that the other claims still get a verdict.
Text = Annotated[str, BeforeValidator(lambda text: text if isinstance(text, str) else "")]


@dataclass(frozen=True, slots=True)
class ClaimedArtifacts:
    """What one prover claims about one block.

    ``nonces`` are those that it has to prove, each once; a nonce without a claim is missing.
    ``k_dim``, ``seq_len`` and ``scheme`` (its name) are None where the source does not say.
    """

    block_hash: str
    public_key: str
    nonces: tuple[int, ...]
    claims: tuple[Claim, ...]
    k_dim: int | None = None
    seq_len: int | None = None
    scheme: str | None = None
    block_height: int | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The block and the prover to select, if a source holds artifacts of several; None is any."""

    block_hash: str | None = None
    public_key: str | None = None

    def fits(self, block_hash: str, public_key: str) -> bool:
        return self.block_hash in {None, block_hash} and self.public_key in {None, public_key}


class _Params(BaseModel):
    seq_len: int | None = Field(default=None, ge=1)


class _Artifact(ArtifactRecord):
    nonce: Nonce
    vector_b64: Text = ""


class _Document(BaseModel):
    """The body of ``/generated`` (protocol B.7); the last three fields may be added to it."""

    block_hash: str
    public_key: str
    artifacts: list[_Artifact]
    encoding: VectorEncoding
    nonces: list[Nonce] | None = None
    params: _Params = _Params()
    scheme: str | None = None


def completed(
    claimed: ClaimedArtifacts, seq_len: int | None, k_dim: int | None, scheme: str | None
) -> ClaimedArtifacts:
    """``claimed`` with the options filled in for what the source does not say.

    Raises LabError for an option that contradicts the source, and for a number that neither says.
    """
    return replace(
        claimed,
        seq_len=_known("seq_len", claimed.seq_len, seq_len),
        k_dim=_known("k_dim", claimed.k_dim, k_dim),
        scheme=_agreed("scheme", claimed.scheme, scheme) or DEFAULT_SCHEME,
    )


def workload(claimed: ClaimedArtifacts, stronger_rng: bool) -> Workload:
    """What an engine computes to check ``claimed``. Raises LabError and ProtocolError."""
    scheme = artifact_scheme(claimed.scheme or DEFAULT_SCHEME, claimed.k_dim, stronger_rng)
    block = Block(claimed.block_hash, claimed.block_height or 0)
    return Workload(scheme, block, claimed.public_key, claimed.seq_len or 0)


def artifact_scheme(name: str, k_dim: int | None, stronger_rng: bool) -> ArtifactScheme:
    """The scheme of that name. Raises LabError for one without vectors, and ProtocolError."""
    scheme = scheme_named(name, k_dim=k_dim, stronger_rng=stronger_rng)
    if not isinstance(scheme, ArtifactScheme):
        raise LabError(f"{name} has no artifacts; a node judges distances by /validate")
    return scheme


def from_file(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts in a JSON file. Raises LabError naming what is wrong with the file."""
    read = read_json(path, _Document)
    if not wanted.fits(read.block_hash, read.public_key):
        raise LabError(f"{path} is about block {read.block_hash}, key {read.public_key}")
    claims = tuple(Claim(one.nonce, one.vector_b64) for one in read.artifacts)
    nonces = read.nonces if read.nonces is not None else [claim.nonce for claim in claims]
    return ClaimedArtifacts(
        block_hash=read.block_hash,
        public_key=read.public_key,
        nonces=tuple(dict.fromkeys(nonces)),
        claims=claims,
        k_dim=read.encoding.k_dim,
        seq_len=read.params.seq_len,
        scheme=read.scheme,
    )


def only_source(
    path: Path, counts: Mapping[tuple[str, str], int], wanted: Selection
) -> tuple[str, str]:
    """The one (block hash, public key) of ``counts`` that is wanted.

    Raises LabError, which lists what ``path`` holds, if none or several are.
    """
    fitting = [source for source in counts if wanted.fits(*source)]
    if len(fitting) == 1:
        return fitting[0]
    held = "\n".join(f"  {n} of block {block}, key {key}" for (block, key), n in counts.items())
    problem = "several nodes or blocks fit" if fitting else "nothing fits"
    raise LabError(f"{path}: {problem}; choose by --block-hash and --public-key from\n{held}")


def to_file(path: Path, claimed: ClaimedArtifacts, claims: Sequence[Claim]) -> None:
    """Write ``claims`` with the block, key and parameters of ``claimed``, for ``from_file``.

    Raises OSError, and LabError if ``claimed`` does not say the length of its vectors.
    """
    if claimed.k_dim is None:
        raise LabError("cannot write claims: k_dim is not known")
    document = {
        "block_hash": claimed.block_hash,
        "public_key": claimed.public_key,
        "nonces": list(claimed.nonces),
        "artifacts": [artifact_record(one.nonce, one.vector_b64) for one in claims],
        "encoding": encoding_of(claimed.k_dim),
        "params": {"seq_len": claimed.seq_len},
        "scheme": claimed.scheme,
    }
    write_json(path, document)


def from_node(node: NodeClient) -> ClaimedArtifacts:
    status = node.describe()
    config, round_id = status["config"], status["round_id"]
    if not config:
        raise LabError(f"{node.url} has no round")
    if "k_dim" not in config:
        raise LabError(f"the round of {node.url} is of the distance protocol; see /validate")
    rows, after = [], 0
    while page := node.results(after):
        rows += [row for row in page if row.round_id == round_id]
        after = page[-1].seq
    return ClaimedArtifacts(
        block_hash=config["block_hash"],
        public_key=config["public_key"],
        nonces=tuple(dict.fromkeys(row.nonce for row in rows)),
        # A nonce that the node failed to compute has no claim, so it counts as missing.
        claims=tuple(Claim(row.nonce, row.value) for row in rows if isinstance(row.value, str)),
        k_dim=config["k_dim"],
        seq_len=config["seq_len"],
        scheme=status.get("scheme"),
    )


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
