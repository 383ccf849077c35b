"""Nodes that a validator trusts, and nodes that cheat on purpose, as sources of vectors.

Each is a file that was written before, or a node that is asked now.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Final

import httpx
import numpy as np

from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.nearness import LEAST_NONCES
from proofserve.remote.node_client import NodeClient, Transcript, UnprovedError, owed_by
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.claims import (
    BY_PYTORCH,
    ClaimedArtifacts,
    Selection,
    kernel_facts,
    read_file,
)
from proofserve.verifier.judges import Vectors
from proofserve.verifier.orders import order_of

# What a node computes for one verdict, unless options say otherwise.
NONCES: Final = 64
# Two nodes that have equal bits in so many of the nonces are one witness: their distance from each
# other would not show how far an honest node may be. Of 27 deployments all pairs have 0 or 1.
SAME: Final = 0.1
# Cards of NVIDIA by their generation.
_GENERATIONS: Final = {
    "Ampere": ("A100", "A800", "A30", "A40"),
    "Hopper": ("H100", "H200", "H800", "H20", "GH200"),
    "Blackwell": ("B100", "B200", "B300"),
    "Ada": ("L40", "L4 ", "RTX 4090"),
}


class WitnessError(ReportedError):
    """A trusted node does not answer, or with something else than vectors."""


def kind_of(processor: object) -> str | None:
    """Which kernels a server has on a card or processor of this name; None if it is not said.

    Cards of one generation have the same; processors, those of their instructions.
    """
    if not isinstance(processor, str):
        return None
    processor = processor.removesuffix(f", {BY_PYTORCH}")
    found = (kind for kind, names in _GENERATIONS.items() if any(n in processor for n in names))
    return next(found, processor.partition(", ")[2] or processor)


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class NodeSource:
    """A file or a node's URL, by the ``name`` that a report has.

    ``heard`` is what the node said when it was asked last.
    """

    name: str
    place: str
    api_key: str | None = field(default=None, repr=False)
    heard: Transcript = field(default_factory=Transcript, repr=False, compare=False)

    @property
    def is_node(self) -> bool:
        return is_url(self.place)


def named(place: str, api_key: str | None = None) -> NodeSource:
    """The source at a URL, or in a file, by the name of either."""
    return NodeSource(place if "://" in place else Path(place).name, place, api_key)


@dataclass(frozen=True, slots=True)
class KnownNode:
    """What a node computed: float32 [width] of each nonce, and what it says of itself."""

    name: str
    vectors: Vectors
    facts: Mapping[str, object]
    weights_digest: str | None = None

    @property
    def title(self) -> str:
        said = self.facts.get("name")
        return self.name if said in {None, self.name} else f"{self.name} ({said})"

    @property
    def kind(self) -> str | None:
        """The kind of card or processor by its own words, as ``kind_of``."""
        return kind_of(self.facts.get("processor"))


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Trusted nodes and suspect ones about the same nonces, ``sample``, in the drawn order."""

    references: Sequence[KnownNode]
    suspects: Sequence[KnownNode]
    sample: Sequence[int]

    def require_different(self) -> None:
        """Raise ReportedError for two references that are one witness, or of other weights."""
        digests = {each.weights_digest: each.name for each in self.references}
        digests.pop(None, None)
        if len(digests) > 1:
            said = "; ".join(f"{name} {digest}" for digest, name in digests.items())
            raise ReportedError(f"weights_digest: the references serve different weights: {said}")
        for one, other in combinations(self.references, 2):
            if are_alike(one, other, self.sample):
                equal = equal_bits(one, other, self.sample)
                raise ReportedError(
                    f"{one.name} and {other.name} have equal bits in {equal} of {len(self.sample)}"
                    " nonces: they are one witness; leave one out, and give another if two do not"
                    " remain"
                )


def witnesses_of(
    claimed: ClaimedArtifacts,
    order: Work,
    references: Sequence[NodeSource],
    suspects: Sequence[NodeSource],
    drawn: tuple[str, int],
    progress: Progress,
) -> Witnesses:
    """What all of them say about a sample of ``claimed``: the seed that draws it, and its size.

    Nodes are asked side by side, once each. Raises ReportedError naming the source, for other work
    and too few common nonces; and WitnessError for one that is down, late or refuses, and for a
    vector that is none.
    """
    files = {each: _read(each, order) for each in (*references, *suspects) if not each.is_node}
    common = set(claimed.nonces).intersection(*({*of.vectors} for of in files.values()))
    seed, most = drawn
    sample = draw([nonce for nonce in claimed.nonces if nonce in common], seed, most)
    if len(sample) < LEAST_NONCES:
        raise ReportedError(
            f"{len(sample)} nonces are common to {claimed.public_key} and all references, and a"
            f" verdict needs {LEAST_NONCES}: give files of the same round, or nodes"
        )
    live = [each for each in (*references, *suspects) if each.is_node]
    known = files | _ask(live, order, sample, progress)
    return Witnesses([known[each] for each in references], [known[e] for e in suspects], sample)


def _read(source: NodeSource, order: Work) -> KnownNode:
    wanted = Selection(order.block_hash, order.public_key)
    read = read_file(Path(source.place), wanted)
    try:
        # What the file says of its work has to be what was asked for.
        order_of(read, order)
    except ReportedError as error:
        raise ReportedError(f"{source.name}: {error}") from error
    facts = read.ran_on or kernel_facts(source.name, {})
    return KnownNode(source.name, _vectors(source, read.claims, order), facts, read.weights_digest)


def _vectors(source: NodeSource, claims: Sequence[Claim], order: Work) -> Vectors:
    found: dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]] = {}
    for claim in claims:
        if claim.nonce in found:
            raise WitnessError(f"{source.name}: nonce {claim.nonce} is there twice")
        try:
            found[claim.nonce] = decode(claim.vector_b64, order.width)
        except MalformedVector as error:
            raise WitnessError(f"{source.name}: nonce {claim.nonce}: {error.message}") from error
    return found


def _ask(
    sources: Sequence[NodeSource], order: Work, nonces: Sequence[int], progress: Progress
) -> dict[NodeSource, KnownNode]:
    if not sources:
        return {}
    names = ", ".join(each.name for each in sources)
    progress.step(f"asking {names} for {len(nonces)} nonces", len(sources))
    found = {}
    with ThreadPoolExecutor(len(sources)) as threads:
        calls = {threads.submit(asked, each, order, nonces): each for each in sources}
        for call in as_completed(calls):
            found[calls[call]] = call.result()
            progress.advance()
    return found


def asked(
    source: NodeSource,
    order: Work,
    nonces: Sequence[int],
    replayed: httpx.MockTransport | None = None,
) -> KnownNode:
    """What a node computes now, or what it said before if that is ``replayed``.

    Raises WitnessError for one that gives no vectors.
    """
    source.heard.forget()
    client = NodeClient(source.place, source.api_key, transcript=source.heard, replayed=replayed)
    try:
        with client as node, owed_by(source.place):
            facts, digest = kernel_facts(source.name, node.kernels()), node.weights_digest()
            model = order.model or str(node.models()[0])
            claims = node.artifacts(replace(order, model=model), nonces)
    except UnprovedError as error:
        raise WitnessError(f"the reference {source.name}, {error.kind}: {error}") from error
    if sorted(claim.nonce for claim in claims) != sorted(nonces):
        raise WitnessError(f"the reference {source.name} answered other nonces than it was asked")
    return KnownNode(source.name, _vectors(source, claims, order), facts, digest)


def equal_bits(one: KnownNode, other: KnownNode, nonces: Sequence[int]) -> int:
    """In how many of the nonces both have a vector, and the same one."""
    rows = [(one.vectors.get(n), other.vectors.get(n)) for n in nonces]
    return sum(a is not None and b is not None and np.array_equal(a, b) for a, b in rows)


def are_alike(one: KnownNode, other: KnownNode, nonces: Sequence[int]) -> bool:
    """Whether two nodes are one witness."""
    return equal_bits(one, other, nonces) >= SAME * len(nonces)
