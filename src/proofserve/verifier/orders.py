"""What a prover was asked for, by its source and by options: an order, and an engine's work."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from proofserve.protocol import DEFAULT_SCHEME, DISTANCE, SKETCHES, default_k_dim
from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.identity import Block
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.claims import ClaimedArtifacts

if TYPE_CHECKING:
    from proofserve.protocol.scheme import Scheme

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """What a user says of the work; None for what the source says, or for a default."""

    scheme: str | None = None
    k_dim: int | None = None
    seq_len: int | None = None
    block_height: int | None = None
    stronger_rng: bool = False


def order_of(claimed: ClaimedArtifacts, options: WorkOptions | Work) -> Work:
    """What a node is asked for to check ``claimed``: an order of the shape that it was asked for.

    A shape is a scheme, ``k_dim`` and ``seq_len``. Asked for is what ``options`` say (of an order
    that was sent, all), else what
    the source says, else the default. Where options and source differ, the call is wrong: which of
    them is not known, and an honest node must not pay for it. Within the shape that was asked
    for, every claim that is not a vector of it is a mismatch, be it one or all: garbage does not
    excuse itself. ``require_width`` is for sources that do not say their shape.

    Raises ReportedError for an option that contradicts the source, and for what neither says and
    has no default.
    """
    name = _agreed("scheme", claimed.scheme, options.scheme) or DEFAULT_SCHEME
    said, usual = None, default_k_dim(name)
    if claimed.width is not None:
        said, rest = divmod(claimed.width, Work("", scheme=name).sequences_per_nonce)
        if rest:
            raise ReportedError(
                f"k_dim: the source has {claimed.width} values per nonce, {name} a pair"
            )
    unsaid = claimed.scheme is None and options.scheme is None and options.k_dim is None
    if unsaid and said not in {None, usual}:
        # The callback of a round of sketches, kept as a file, says its width alone.
        raise ReportedError(
            f"scheme: the source says k_dim {said}, {name} has {usual}; give --scheme"
        )
    height = _agreed("block_height", claimed.block_height, options.block_height)
    if height is None and name in SKETCHES:
        raise ReportedError("the source does not say block_height; give --block-height")
    seq_len = _agreed("seq_len", claimed.seq_len, options.seq_len)
    if seq_len is None:
        raise ReportedError("the source does not say seq_len; give --seq-len")
    return Work(
        model="",
        block_hash=claimed.block_hash,
        public_key=claimed.public_key,
        seq_len=seq_len,
        block_height=height or 0,
        k_dim=_agreed("k_dim", said, options.k_dim) or usual,
        scheme=name,
        stronger_rng=options.stronger_rng,
    )


def workload_of(order: Work) -> Workload:
    """What engines compute for an order to a node. Raises as ``vector_scheme``."""
    scheme = vector_scheme(order.scheme or DEFAULT_SCHEME, order.k_dim, order.stronger_rng)
    block = Block(order.block_hash, order.block_height)
    return Workload(scheme, block, order.public_key, order.seq_len)


def order_for(work: Workload, model: str = "") -> Work:
    """The order with which a node computes ``work`` by its ``model``: that of ``workload_of``."""
    scheme = work.scheme
    return Work(
        model,
        block_hash=work.block.hash,
        block_height=work.block.height,
        public_key=work.public_key,
        seq_len=work.seq_len,
        # Of a sketch this is half the width: an artifact has both twins' sketches.
        k_dim=scheme.width // scheme.sequences_per_nonce,
        scheme=scheme.name,
        stronger_rng=bool(getattr(scheme, "stronger_rng", False)),
    )


def require_width(claimed: ClaimedArtifacts, asked: Work) -> None:
    """Raise ReportedError if the vectors of a file are not such as ``asked`` for, as a whole.

    If each of them is a sound vector of one other width, they answer another request than the one
    that is assumed here, or contradict what the file says of them itself, which is no reason to
    convict. One vector of the right width makes all others mismatches. A node cannot hide behind
    this: it is not called for what a node answers, nor where a validator says --k-dim and the
    scheme is said too. Then all the vectors are mismatches.
    """
    theirs = _width_of(claimed.claims[0].vector_b64) if claimed.claims else None
    if theirs in {None, asked.width}:
        return
    if all(_width_of(claim.vector_b64) == theirs for claim in claimed.claims):
        said = f"every vector of the source has {theirs} values"
        if claimed.width is not None:
            raise ReportedError(f"k_dim: {said}, and its encoding says {claimed.width}")
        raise ReportedError(
            f"k_dim: {said}, a vector of {asked.scheme} here {asked.width};"
            " give --scheme and --k-dim as the node was asked for them"
        )


def _width_of(text: str) -> int | None:
    """How many values the vector in ``text`` has; None if it is not a sound vector."""
    # Three bytes in four characters, two bytes in a value.
    width = len(text.rstrip("=")) * 3 // 4 // 2
    try:
        decode(text, width)
    except MalformedVector:
        return None
    return width or None


def vector_scheme(name: str, k_dim: int, stronger_rng: bool) -> "Scheme":
    """The scheme of that name. Raises ReportedError for one without vectors, and ProtocolError."""
    # It imports torch, which a validator needs only to recompute.
    from proofserve.protocol.schemes import scheme as scheme_named  # noqa: PLC0415

    if name == DISTANCE:
        raise ReportedError(f"{name} has no artifacts; a node judges distances by /validate")
    # Only sketches have no weaker seeds to strengthen; asked for, they refuse the option by name.
    stronger = {"stronger_rng": stronger_rng} if stronger_rng or name not in SKETCHES else {}
    return scheme_named(name, k_dim=k_dim, **stronger)


def _agreed(field: str, said: T | None, given: T | None) -> T | None:
    if said is not None and given not in {None, said}:
        option = f"--{field.replace('_', '-')}"
        raise ReportedError(f"{option} {given} contradicts the source, which says {said}")
    return said if said is not None else given
