"""Which experts a mixture uses: the block's, or kept from one forward and held in another one's.

A token whose experts score nearly alike changes one of them whatever pushed its scores, be it
rounding or changed weights. Honest errors then point to where a suspect's weights move the result,
unless the suspect is computed with the experts of the published weights. What is held are the ids;
the weights of the mix are the suspect's own scores at these ids, by the model's own rule.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routers import Router, routers_of
from proofserve.protocol.scheme import BlockScheme

# Decides for one forward: the router's place in ``routers_of`` and the ids that it chose, int64
# [n, positions, k], give the ids to use.
Choice = Callable[[int, Tensor], Tensor]


@contextmanager
def choosing(
    network: Network, routers: tuple[Router, ...], begin: Callable[[Tensor], Choice]
) -> Iterator[None]:
    """While this is open, a ``Choice`` decides the experts of every forward of ``network``.

    ``begin`` makes it of what the network reads, embeddings [n, seq_len, hidden] or ids
    [n, seq_len]. A forward raises CheckpointError if a layer does not ask its router.
    """
    forward = _Forward(begin)
    with ExitStack() as hooks:
        hooks.enter_context(
            network.decoder.register_forward_pre_hook(forward.begun, with_kwargs=True)
        )
        for index, router in enumerate(routers):
            hook = forward.of_router(index, router)
            hooks.enter_context(router.module.register_forward_hook(hook))
        hooks.enter_context(network.decoder.register_forward_hook(forward.ended(routers)))
        yield


@contextmanager
def seeded_experts(network: Network, block: BlockScheme, seq_len: int) -> Iterator[None]:
    """While this is open, ``block`` chooses the experts of forwards of ``seq_len`` positions.

    A forward of the first positions alone, by a node that leaves out the others, has theirs.
    Does nothing for a scheme that leaves them to the routers, and of a dense network. Raises
    CheckpointError for a router that is unknown, and a forward as in ``choosing``.
    """
    routers = routers_of(network) if block.chooses_experts else ()
    if not routers:
        yield
        return

    def seeded(index: int, ids: Tensor) -> Tensor:
        router = routers[index]
        chosen = block.experts(router.layer, router.choosing(ids.shape[-1]), seq_len)
        return chosen[: ids.shape[1]].to(ids.dtype).expand_as(ids).contiguous()

    with choosing(network, routers, lambda _read: seeded):
        yield


class _Forward:
    """The forward that runs: how many sequences it has, and which routers it has asked."""

    def __init__(self, begin: Callable[[Tensor], Choice]) -> None:
        self._begin = begin
        self._asked: list[int] = []

    def begun(self, _decoder: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        read = options.get("inputs_embeds")
        read = options["input_ids"] if read is None else read
        self._choice, self._sequences = self._begin(read), len(read)
        self._asked = []

    def of_router(self, index: int, router: Router) -> Callable[..., tuple[Tensor, ...]]:
        place = router.family.ids

        def chosen(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> Any:
            self._asked.append(index)
            own = output[place]
            ids = self._choice(index, own.view(self._sequences, -1, own.shape[-1]))
            return router.with_ids(output, ids.view(own.shape))

        return chosen

    def ended(self, routers: tuple[Router, ...]) -> Callable[..., None]:
        def check(*_: Any) -> None:
            if sorted(self._asked) != list(range(len(routers))):
                name = type(routers[0].module).__name__
                raise CheckpointError(
                    f"experts cannot be chosen for this model: layers did not ask their {name};"
                    " a kernel chooses the experts itself"
                )

        return check


class ExpertMemory:
    """The experts that ``published`` chose for each sequence that it read while ``recording``.

    A sequence is known by its embeddings or tokens, so it may come in another batch or order. The
    ids take a byte each, or two where a layer has more than 256 experts. Of a dense network
    nothing is recorded or held.
    """

    def __init__(self, published: Network) -> None:
        self._chosen: dict[tuple[bytes, int], NDArray[np.unsignedinteger[Any]]] = {}
        self._published = published
        self._routers: tuple[Router, ...] = ()
        self._obstacle: CheckpointError | None = None
        try:
            self._routers = routers_of(published)
        except CheckpointError as error:
            # Only predictions need the experts: all else can be computed without.
            self._obstacle = error

    @property
    def is_dense(self) -> bool:
        """Whether the network is known to mix no experts."""
        return not self._routers and self._obstacle is None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this is open, forwards of the published network are remembered."""
        if not self._routers:
            yield
            return
        with choosing(self._published, self._routers, self._record):
            yield

    @contextmanager
    def holding(self, suspect: Network) -> Iterator[None]:
        """While this is open, forwards of ``suspect`` use the experts of the published network.

        ``suspect`` may share modules with it. Raises CheckpointError if a router is unknown, or if
        the two have other layers or numbers of experts. A forward over a sequence that was not
        recorded raises ValueError.
        """
        if self._obstacle:
            raise self._obstacle
        if not self._routers:
            yield
            return
        routers = routers_of(suspect)
        if [each.place for each in routers] != [each.place for each in self._routers]:
            raise CheckpointError(
                f"the direction test cannot hold experts: the suspect mixes {_layout(routers)},"
                f" the published checkpoint {_layout(self._routers)}"
            )
        with choosing(suspect, routers, self._held):
            yield

    def _record(self, read: Tensor) -> Choice:
        rows = _digests(read)

        def record(router: int, ids: Tensor) -> Tensor:
            small = np.uint8 if ids.max() < 256 else np.uint16
            for row, used in zip(rows, ids.cpu().numpy().astype(small), strict=True):
                # A copy, or one sequence would keep those of its whole batch in memory.
                self._chosen[row, router] = used.copy()
            return ids

        return record

    def _held(self, read: Tensor) -> Choice:
        rows = _digests(read)
        if any((row, 0) not in self._chosen for row in rows):
            raise ValueError("the published network has not read this sequence before")

        def held(router: int, ids: Tensor) -> Tensor:
            kept = np.stack([self._chosen[row, router] for row in rows])
            return torch.from_numpy(kept.astype(np.int64)).to(ids)

        return held


def _layout(routers: tuple[Router, ...]) -> str:
    return f"{max((r.experts for r in routers), default=0)} experts in {len(routers)} layers"


def _digests(read: Tensor) -> list[bytes]:
    """One digest for each row of ``read``, of its bytes."""
    raw = read.contiguous().cpu().view(torch.uint8).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw]
