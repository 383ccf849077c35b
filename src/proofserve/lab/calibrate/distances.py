"""Distances of many nonces on several blocks and keys, as a node computes them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.client.errors import NodeError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.records import DistanceWork
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Winner

SIGN_FLIPS: Final = "sign_flips"
LAYER_HOOKS: Final = "layer_hooks"
# The two ways to randomise hidden states that the requirements compare; never both at once.
METHODS: Final = (SIGN_FLIPS, LAYER_HOOKS)
# A node recomputes only distances that are claimed; the claimed value does not matter.
CLAIMED = 1.0

# float64 [blocks, keys, nonces of one key]
Distances = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """What to compute: ``nonces`` per block, shared evenly by its ``keys`` and rounded up.

    ``seq_len`` is in tokens per nonce. ``batch_size`` is in nonces per call of the node; a whole
    number of its forwards wastes nothing.
    """

    nonces: int
    blocks: int
    keys: int
    seq_len: int
    batch_size: int

    @property
    def per_key(self) -> int:
        return -(-self.nonces // self.keys)

    @property
    def per_block(self) -> int:
        return self.per_key * self.keys

    @property
    def total(self) -> int:
        return self.per_block * self.blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.blocks, self.keys, self.per_key

    def orders(self, model: str, method: str) -> Iterator[DistanceWork]:
        for block in range(self.blocks):
            yield DistanceWork(
                model,
                block_hash=f"calibration-block-{block}",
                public_key=_key(0),
                seq_len=self.seq_len,
                batch_size=self.batch_size,
                sign_flips=method == SIGN_FLIPS,
                layer_hooks=method == LAYER_HOOKS,
            )


def collect(
    node: NodeClient, model: str, method: str, sample: Sample, progress: Progress
) -> Distances:
    """The distances of ``sample``. The node stores none of them and ends up stopped.

    Raises NodeError if the node refuses (it does while a round generates) or omits a distance.
    """
    ranges = chunks(range(sample.per_key), sample.batch_size)
    calls = list(itertools.product(range(sample.keys), ranges))
    title = f"{model}: {sample.total} nonces with {method.replace('_', ' ')}"
    progress.step(title, sample.blocks * len(calls))
    computed: list[float] = []
    for order in sample.orders(model, method):
        with node.judging(order):
            for key, nonces in calls:
                claims = [Winner(nonce, CLAIMED) for nonce in nonces]
                judgement = node.judge(replace(order, public_key=_key(key)), claims)
                computed += judgement.computed_distances
                progress.advance()
    distances = np.array(computed, dtype=np.float64).reshape(sample.shape)
    if not np.isfinite(distances).all():
        raise NodeError("the node computed a distance that is not a number")
    return distances


def _key(number: int) -> str:
    return f"calibration-key-{number}"
