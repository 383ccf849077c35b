"""The weights with which an audited prover saves work: those of the bank, and private ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from proofserve.engines.reference.network import Network
from proofserve.engines.reference.pruning import share_of_experts, without_experts
from proofserve.engines.reference.rounding import Rounding, in_groups, integers, rotated, stochastic
from proofserve.engines.reference.routers import routers_of
from proofserve.engines.reference.suspects import SUSPECTS, suspect, weight_bits
from proofserve.engines.reference.variants import (
    in_dtype,
    of_rank,
    pruned,
    share_of_rank,
    with_cache,
    with_int8_attention,
    with_matrices,
    with_random_matrices,
)
from proofserve.lab.audit.compute_share import SERVED_BITS, Price

# Shares of the full rank; from a half on, square matrices save nothing.
RANKS = {"half": 0.5, "a quarter": 0.25}
# Shares of a mixture's experts, the least used ones.
PRUNED_EXPERTS: Final = {"a quarter of the experts pruned": 0.25, "half of the experts pruned": 0.5}
# No public format has groups of this size.
PRIVATE_GROUP = 48
# A seed that only the prover knows, of the rotation in which it rounds.
_ROTATION: Final = 1


@dataclass(frozen=True, slots=True)
class ChangedWeights:
    """``private`` weights are none of the bank; ``saving`` is the share of compute they save.

    Of pruned experts it is the share of the layers' memory.
    """

    name: str
    saving: float
    make: Callable[[Network], Network]
    private: bool = False


def changed_weights(network: Network, price: Price) -> Iterator[ChangedWeights]:
    for name in SUSPECTS:
        bits = weight_bits(name)
        saving = price.bits(bits) if bits < SERVED_BITS else price.cache(8)
        yield ChangedWeights(name, saving, partial(suspect, name=name))
    yield from _private(network, price)


def _private(network: Network, price: Price) -> Iterator[ChangedWeights]:
    def change(name: str, saving: float, make: Callable[[Network], Network]) -> ChangedWeights:
        return ChangedWeights(name, saving, make, private=True)

    def matrices(rounding: Rounding) -> Callable[[Network], Network]:
        return lambda of: with_matrices(of, in_dtype(rounding))

    chance = partial(with_random_matrices, change=lambda g: in_dtype(stochastic(8, g)))
    yield change("int8 per channel by chance", price.bits(8), chance)
    groups = partial(
        with_random_matrices, change=lambda g: in_dtype(in_groups(stochastic(8, g), 32))
    )
    yield change("int8 g32 by chance", price.bits(8), groups)
    grouped = in_groups(integers(8), PRIVATE_GROUP)
    yield change(f"int8 g{PRIVATE_GROUP}, private", price.bits(8), matrices(grouped))
    turned = rotated(in_groups(integers(8), 32), _ROTATION)
    yield change("int8 g32, rotated in private", price.bits(8), matrices(turned))
    every_other = range(0, len(network.layers), 2)
    half = partial(with_matrices, change=in_dtype(integers(8)), layers=every_other)
    yield change("int8 per channel on half of the layers", price.bits(8) / 2, half)
    yield change("KV cache in int8", price.cache(8), partial(with_cache, rounding=integers(8)))
    # As in the cache, half of attention's work is left at most.
    yield change("attention in int8", price.cache(8), with_int8_attention)
    yield change("pruned 2:4", price.of_matrices(0.5), matrices(pruned))
    for name, share in RANKS.items():
        saving = price.of_matrices(1.0 - share_of_rank(network, share))
        yield change(f"{name} of the rank", saving, matrices(partial(of_rank, share=share)))
    if routers_of(network):
        for name, share in PRUNED_EXPERTS.items():
            saving = share * share_of_experts(network)
            yield change(name, saving, partial(without_experts, share=share))


def size_saving(folder: Path, model: Path) -> float:
    """By how much (0 to 1) the weights of the checkpoint in ``folder`` are smaller files."""

    def size(of: Path) -> int:
        return sum(file.stat().st_size for file in of.glob("*.safetensors"))

    return max(0.0, 1.0 - size(folder) / size(model)) if size(model) else 0.0
