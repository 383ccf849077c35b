"""Which experts a mixture uses: the block's, or kept from one forward and held in another one's.

A token whose experts score nearly alike changes one of them whatever pushed its scores, be it
rounding or changed weights. Honest errors then point to where a suspect's weights move the result,
unless the suspect is computed with the experts of the published weights. What is held are the ids;
the weights of the mix are the suspect's own scores at these ids, by the model's own rule.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines.errors import CheckpointError
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routers import Router, routers_in, routers_of
from proofserve.protocol.scheme import BlockScheme

# Decides for one batch: a router and the ids that it chose, int64 [n, positions, k], give the ids
# to use.
Choice = Callable[[Router, Tensor], Tensor]
# Makes it of what the network reads, embeddings [n, seq_len, hidden] or ids [n, seq_len].
ChoiceOfExperts = Callable[[Tensor], Choice]


@contextmanager
def choosing(index: int, layer: nn.Module, choice: Choice | None, sequences: int) -> Iterator[None]:
    """While this is open, ``choice`` decides the experts of one forward of a layer.

    None leaves them to the routers. Raises CheckpointError for a router that is unknown, and if the
    layer does not ask it.
    """
    routers = routers_in(index, layer) if choice else []
    asked: list[Router] = []

    def chosen(router: Router, _module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> Any:
        asked.append(router)
        own = output[router.family.ids]
        ids = choice(router, own.view(sequences, -1, own.shape[-1])) if choice else own
        return router.with_ids(output, ids.view(own.shape))

    with ExitStack() as hooks:
        for each in routers:
            # Before an emulation leaves the router: no kernel rounds what the scheme weighs.
            hook = each.module.register_forward_hook(partial(chosen, each), prepend=True)
            hooks.enter_context(hook)
        yield
    if asked != routers:
        name = type(routers[0].module).__name__
        raise CheckpointError(
            f"experts cannot be chosen for this model: layers did not ask their {name};"
            " a kernel chooses the experts itself"
        )


def seeded_experts(network: Network, block: BlockScheme, seq_len: int) -> ChoiceOfExperts | None:
    """The experts that ``block`` chooses in forwards of ``seq_len`` positions.

    A forward of the first positions alone, by a node that leaves out the others, has theirs. None
    for a scheme that leaves them to the routers, and for a dense network. Raises CheckpointError
    for a router that is unknown.
    """
    if not block.chooses_experts or not routers_of(network):
        return None

    def seeded(router: Router, ids: Tensor) -> Tensor:
        chosen = block.experts(router.layer, router.choosing(ids.shape[-1]), seq_len)
        return chosen[: ids.shape[1]].to(ids.dtype).expand_as(ids).contiguous()

    return lambda _read: seeded


class ExpertMemory:
    """The experts that ``published`` chose for each sequence that it read while ``recording``.

    A sequence is known by its embeddings or tokens, so it may come in another batch or order. The
    ids take a byte each, or two where a layer has more than 256 experts. Of a dense network
    nothing is recorded or held.
    """

    def __init__(self, published: Network) -> None:
        self._chosen: dict[tuple[bytes, int], NDArray[np.unsignedinteger[Any]]] = {}
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

    def recording(self) -> ChoiceOfExperts | None:
        """For forwards of the published network, whose experts stay and are remembered."""
        return (lambda read: partial(self._record, _digests(read))) if self._routers else None

    def holding(self, suspect: Network) -> ChoiceOfExperts | None:
        """For forwards of ``suspect``, which then use the experts of the published network.

        Raises CheckpointError if a router is unknown, or if the two have other layers or numbers of
        experts. A forward over a sequence that was not recorded raises ValueError.
        """
        if self._obstacle:
            raise self._obstacle
        if not self._routers:
            return None
        routers = routers_of(suspect)
        places, own = ([(r.layer, r.experts) for r in each] for each in (routers, self._routers))
        if places != own:
            raise CheckpointError(
                f"the direction test cannot hold experts: the suspect mixes {_layout(routers)},"
                f" the published checkpoint {_layout(self._routers)}"
            )
        return lambda read: partial(self._hold, _digests(read))

    def _record(self, rows: Sequence[bytes], router: Router, ids: Tensor) -> Tensor:
        small = np.uint8 if ids.max() < 256 else np.uint16
        for row, used in zip(rows, ids.cpu().numpy().astype(small), strict=True):
            # A copy, or one sequence would keep those of its whole batch in memory.
            self._chosen[row, router.layer] = used.copy()
        return ids

    def _hold(self, rows: Sequence[bytes], router: Router, ids: Tensor) -> Tensor:
        try:
            kept = np.stack([self._chosen[row, router.layer] for row in rows])
        except KeyError:
            message = "the published network has not read this sequence before"
            raise ValueError(message) from None
        return torch.from_numpy(kept.astype(np.int64)).to(ids)


def _layout(routers: tuple[Router, ...]) -> str:
    return f"{max((r.experts for r in routers), default=0)} experts in {len(routers)} layers"


def _digests(read: Tensor) -> list[bytes]:
    """One digest for each row of ``read``, of its bytes."""
    raw = read.contiguous().cpu().view(torch.uint8).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw]
