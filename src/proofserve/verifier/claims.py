"""Artifacts that a prover published, from a file, a receiver or a node."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AliasChoices, AliasPath, BaseModel, BeforeValidator, Field

from proofserve.protocol import DEFAULT_SCHEME
from proofserve.protocol.nonces import MAX_NONCE, NonceLane
from proofserve.protocol.verdict.comparison import Claim, Mismatch, Reason
from proofserve.receiver.reader import ReceiverFileError, is_database, reading
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError, Withheld, owed_by
from proofserve.remote.records import Work
from proofserve.reports import ReportedError, parsed, read_json
from proofserve.rounds.records import PYTORCH_OPS
from proofserve.wire.records import ArtifactRecord, VectorEncoding, artifact_record, encoding_of

Nonce = Annotated[int, Field(strict=True, ge=0, le=MAX_NONCE)]
# A claim that is no text counts as an empty one, so that the other claims still get a verdict.
Text = Annotated[str, BeforeValidator(lambda text: text if isinstance(text, str) else "")]
# What the names of processors, and of kernels, have where vLLM's own operations do not run.
BY_PYTORCH: Final = "ops of PyTorch"
_SAY_LANE: Final = "give --lane FIRST:STEP, NODE_ID:NODE_COUNT of a round without groups"


@dataclass(frozen=True, slots=True)
class ClaimedArtifacts:
    """What one prover claims about one block.

    ``nonces`` are those that it has to prove, each once; a nonce without a claim is missing.
    ``width`` is the number of values per vector. It and what follows are None where the source does
    not say; ``scheme`` is a name, ``weights_digest`` in hexadecimal. ``ran_on`` are the facts of
    the engine, where a file has them.

    ``faults`` has the nonces that are no mere missing claim: left out, or not under their root.
    ``left_out`` counts the former, of which ``nonces`` may have a part. ``unknown_lane`` says why
    the prover may have chosen its nonces itself, None if it cannot. ``withheld`` is None if the
    prover showed all that it owed.
    """

    block_hash: str
    public_key: str
    nonces: tuple[int, ...]
    claims: tuple[Claim, ...]
    width: int | None = None
    seq_len: int | None = None
    scheme: str | None = None
    block_height: int | None = None
    weights_digest: str | None = None
    faults: Mapping[int, Mismatch] = field(default_factory=dict)
    ran_on: Mapping[str, object] | None = None
    left_out: int = 0
    unknown_lane: str | None = None
    withheld: Withheld | None = None

    def require_digest(self, ours: str | None) -> None:
        """Raise UnprovedError if the prover's checkpoint is known to be another one than ours."""
        if None not in {self.weights_digest, ours} and self.weights_digest != ours:
            text = f"the source has {self.weights_digest}, the checkpoint here {ours}"
            raise UnprovedError(Unproved.OTHER_WEIGHTS, f"weights_digest: {text}")

    def of_lane(
        self,
        lane: NonceLane,
        whole: bool = True,
        lost: Callable[[int | None, int], str] = lambda _before, _after: "",
    ) -> "ClaimedArtifacts":
        """These claims, and all other nonces of ``lane`` that were owed.

        Owed are those up to the last claim: the ``whole`` lane, or from the first claim on. Where
        one is without a claim, ``lost`` is called with the nonces claimed before it and after it,
        and may say who else than the prover can have lost it; else it is left out. Where more are
        left out than claimed, ``nonces`` has only as many of them as claims. Raises ReportedError
        for a claim of another lane.
        """
        if not self.nonces:
            return replace(self, unknown_lane=None)
        places: dict[int, int] = {}
        for nonce in self.nonces:
            if (index := lane.index_of(nonce)) is None:
                raise ReportedError(f"--lane: nonce {nonce} of the source is of another lane")
            places[index] = nonce
        indices = sorted(places)
        gaps: list[int] = []
        left_out, undelivered, withheld = 0, 0, self.withheld
        for before, after in pairwise([-1, *indices] if whole else indices):
            missing = after - before - 1
            if missing and (excuse := lost(places.get(before), places[after])):
                undelivered += missing
                text = f"{undelivered} nonces of the lane, below others that came; {excuse}"
                withheld = Withheld(Unproved.UNDELIVERED, text)
            elif missing:
                left_out += missing
                gaps += islice(range(before + 1, after), max(0, len(indices) - len(gaps)))
        faults = {n: Mismatch(n, Reason.GAP) for n in map(lane.nonce, gaps)}
        return replace(
            self,
            nonces=(*self.nonces, *faults),
            faults={**self.faults, **faults},
            left_out=left_out,
            unknown_lane=None,
            withheld=withheld,
        )


@dataclass(frozen=True, slots=True)
class Selection:
    """The block and the prover that are expected, or selected among several; None is any.

    ``lane`` has the nonces that were owed, None for what the source says.
    """

    block_hash: str | None = None
    public_key: str | None = None
    lane: NonceLane | None = None

    def fits(self, block_hash: str, public_key: str) -> bool:
        return self.block_hash in {None, block_hash} and self.public_key in {None, public_key}

    def require(self, source: object, block_hash: str, public_key: str) -> None:
        """Raise ReportedError naming both sides if ``source`` is about another block or key."""
        for name, found in (("block_hash", block_hash), ("public_key", public_key)):
            if (wanted := getattr(self, name)) not in {None, found}:
                raise ReportedError(f"{name}: expected is {wanted}, {source} has {found}")


class _Artifact(ArtifactRecord):
    nonce: Nonce
    vector_b64: Text = ""


class _Document(BaseModel):
    """A body of ``/generated`` (B.7) or ``/generate``; fields with a default may be missing.

    Collections of vectors that others published have ``k_dim`` and ``seq_len`` beside the rest.
    """

    block_hash: str
    block_height: int | None = Field(default=None, ge=0)
    public_key: str
    artifacts: list[_Artifact]
    k_dim: int = Field(ge=1, validation_alias=AliasChoices(AliasPath("encoding", "k_dim"), "k_dim"))
    encoding: VectorEncoding | None = None
    nonces: list[Nonce] | None = None
    seq_len: int | None = Field(
        None, ge=1, validation_alias=AliasChoices(AliasPath("params", "seq_len"), "seq_len")
    )
    scheme: str | None = None
    weights_digest: str | None = None
    ran_on: dict[str, Any] | None = None
    node_id: int | None = None
    node_count: int | None = None
    group_id: int = 0
    n_groups: int = 1

    @property
    def lane(self) -> NonceLane | None:
        """Raises ProtocolError."""
        if self.node_id is None or self.node_count is None:
            return None
        return NonceLane(self.node_id, self.node_count, self.group_id, self.n_groups)


def read_file(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts in a JSON file, or in a file of ``proofserve receive``.

    Raises ReportedError, and ProtocolError for the lane that a file names.
    """
    with readable(path):
        return (from_receiver if is_database(path) else from_file)(path, wanted)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises ReportedError for a file, of a receiver or not, that cannot be read."""
    try:
        yield
    except OSError as error:
        raise ReportedError(f"cannot read {path}: {error.strerror}") from error
    except ReceiverFileError as error:
        raise ReportedError(str(error)) from error


def from_file(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts in a JSON file.

    Of a lane that only the file names, those from its first claim are owed: a callback has a part
    of a round. Raises ReportedError naming what is wrong with the file, and ProtocolError for its
    lane.
    """
    read = read_json(path, _Document)
    wanted.require(path, read.block_hash, read.public_key)
    claimed = _claimed(read)
    if wanted.lane is not None:
        return claimed.of_lane(wanted.lane)
    return claimed if read.lane is None else claimed.of_lane(read.lane, whole=False)


def from_answer(content: bytes, source: str) -> ClaimedArtifacts:
    """Those in an answer of ``/generate``. Raises ReportedError naming what is wrong with it."""
    return _claimed(parsed(content, _Document, source))


def _claimed(read: _Document) -> ClaimedArtifacts:
    claims = tuple(Claim(one.nonce, one.vector_b64) for one in read.artifacts)
    nonces = read.nonces if read.nonces is not None else [claim.nonce for claim in claims]
    return ClaimedArtifacts(
        block_hash=read.block_hash,
        public_key=read.public_key,
        nonces=tuple(dict.fromkeys(nonces)),
        claims=claims,
        width=read.k_dim,
        seq_len=read.seq_len,
        scheme=read.scheme,
        block_height=read.block_height,
        weights_digest=read.weights_digest,
        ran_on=read.ran_on,
        unknown_lane=f"the source does not say which nonces were owed; {_SAY_LANE}",
    )


def from_receiver(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The vectors that a receiver has of one block and key.

    A callback with vectors does not say its lane. Between two callbacks whose numbers follow each
    other nothing was lost on the way. Raises ReportedError, and ReceiverFileError.
    """
    with reading(path) as received:
        if not (counts := received.counts()) and received.rounds():
            raise ReportedError(f"{path} has roots and no vectors; give --open NODE")
        source = only_source(path, counts, wanted)
        rows = received.of(source)
    claims = tuple(Claim(nonce, text) for nonce, text, _ in rows)
    sequences = {nonce: sequence for nonce, _, sequence in rows}
    unknown = f"a receiver does not know which nonces were owed; {_SAY_LANE}"
    nonces = tuple(claim.nonce for claim in claims)
    claimed = ClaimedArtifacts(*source, nonces, claims, unknown_lane=unknown)

    def lost(before: int | None, after: int) -> str:
        one, other = None if before is None else sequences[before], sequences[after]
        if one is not None and other is not None and other - one in {0, 1}:
            return ""
        how = "have the node's operator run `proofserve outbox retry --expired`"
        return f"a callback between them may not have arrived; {how}"

    return claimed if wanted.lane is None else claimed.of_lane(wanted.lane, lost=lost)


def only_source(
    path: Path, counts: Mapping[tuple[str, str], int], wanted: Selection
) -> tuple[str, str]:
    """The wanted one. Raises ReportedError, which lists all of ``path``, if none or several are."""
    fitting = [source for source in counts if wanted.fits(*source)]
    if len(fitting) == 1:
        return fitting[0]
    held = "\n".join(f"  {n} of block {block}, key {key}" for (block, key), n in counts.items())
    asked = f"block {wanted.block_hash or 'any'}, key {wanted.public_key or 'any'}"
    problem = f"several nodes or blocks fit {asked}" if fitting else f"nothing fits {asked}"
    raise ReportedError(f"{path}: {problem}; choose by --block-hash and --public-key from\n{held}")


def document(
    order: Work, claims: Sequence[Claim], ran_on: Mapping[str, object] | None = None
) -> dict[str, object]:
    """``claims`` of a node about ``order`` as ``from_file`` reads them."""
    return {
        "block_hash": order.block_hash,
        "block_height": order.block_height,
        "public_key": order.public_key,
        "nonces": [claim.nonce for claim in claims],
        "artifacts": [artifact_record(one.nonce, one.vector_b64) for one in claims],
        "encoding": encoding_of(order.width),
        "params": {"seq_len": order.seq_len},
        "scheme": order.scheme,
        "ran_on": ran_on,
    }


def kernel_facts(name: str, said: Mapping[str, str]) -> dict[str, object]:
    """``KernelFacts`` of a real engine, by what its node says; ``name`` if that is nothing."""
    device = [text for each in ("processor", "instructions") if (text := said.get(each))]
    if device and said.get("ops") == PYTORCH_OPS:
        device.append(BY_PYTORCH)
    known = {
        "engine": said.get("vllm") and f"vLLM {said['vllm']}",
        "processor": ", ".join(device) or None,
        **{each: said.get(each) for each in ("torch", "dtype", "kv_dtype", "attention")},
    }
    ranks = int(text) if (text := said.get("ranks", "")).isdecimal() else None
    shown = [known["engine"], known["processor"], known["dtype"], ranks and f"{ranks} ranks"]
    title = ", ".join(text for text in shown if text) or name
    return {"name": title, "emulated": False, **known, "ranks": ranks}


def from_node(node: NodeClient, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts of a node's round.

    A node says how many results its round has: where it lists fewer, it has deleted some after
    delivery (ADR 21), and which ones were owed is not known. Raises UnprovedError for a node that
    cannot be read, and ReportedError for other rounds than the wanted one.
    """
    with owed_by(node.url):
        claimed = _listed(node, wanted.lane)
        claimed = replace(claimed, ran_on=kernel_facts(node.url, node.kernels()))
    wanted.require(node.url, claimed.block_hash, claimed.public_key)
    return claimed


def _listed(node: NodeClient, lane: NonceLane | None) -> ClaimedArtifacts:
    # Before the rows: more may come meanwhile, and none may seem deleted.
    status = node.describe()
    config, round_id = status["config"], status["round_id"]
    if not config:
        raise ReportedError(f"{node.url} has no round")
    if "k_dim" not in config:
        raise ReportedError(f"the round of {node.url} is of the distance protocol; see /validate")
    scheme = config.get("scheme") or status.get("scheme") or DEFAULT_SCHEME
    rows, after = [], 0
    while page := node.results(after):
        rows += [row for row in page if row.round_id == round_id]
        after = page[-1].seq
    claimed = ClaimedArtifacts(
        block_hash=config["block_hash"],
        public_key=config["public_key"],
        nonces=tuple(dict.fromkeys(row.nonce for row in rows)),
        # A nonce that the node failed to compute has no claim, so it counts as missing.
        claims=tuple(Claim(row.nonce, row.value) for row in rows if isinstance(row.value, str)),
        width=config["k_dim"] * Work("", scheme=scheme).sequences_per_nonce,
        seq_len=config["seq_len"],
        scheme=scheme,
        block_height=config.get("block_height"),
        weights_digest=node.weights_digest(),
    )
    stats = status["stats"] or {}
    deleted = stats.get("total_found", 0) + stats.get("failed", 0) - len(rows)
    said = f"the node lists {deleted} results fewer than its round has" if deleted > 0 else ""
    if lane is not None:
        return claimed.of_lane(lane, lost=lambda _before, _after: said)
    if said or config.get("node_count") is None or status.get("lanes"):
        why = said or "the node does not say the one lane of its round"
        return replace(claimed, unknown_lane=f"{why}; verify what a receiver has, or {_SAY_LANE}")
    numbers = ("node_id", "node_count", "group_id", "n_groups")
    own = NonceLane(*(config[name] for name in numbers if name in config))
    if any(own.index_of(nonce) is None for nonce in claimed.nonces):
        raise ValueError(f"it lists nonces that are not of its own lane, {own}")
    return claimed.of_lane(own)
