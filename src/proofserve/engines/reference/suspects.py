"""The bank of suspects: weights that a cheating prover may deploy instead of the published ones.

A suspect is made from the published weights alone, as anyone can make it. Weights that were rounded
with the help of calibration data (AWQ, GPTQ) are suspects as checkpoints of their own. Of a
quantised checkpoint only what is cheaper is suspected.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from proofserve.engines.reference.network import Network
from proofserve.engines.reference.rounding import (
    Rounding,
    fp8,
    fp8_unscaled,
    in_blocks,
    in_dtype,
    in_groups,
    integers,
    mxfp4,
    nf4,
    nvfp4,
    of_whole_matrix,
    shifted_integers,
)
from proofserve.engines.reference.variants import (
    with_activations,
    with_cache,
    with_matrices,
    without_layers,
)

FP8_CACHE: Final = "KV cache in fp8"
# A writer of chat, and no suspect of proofs.
SKIPPED: Final = "weights without the middle layer"

# In the order in which a validator tries them: one of each family first.
_WEIGHTS: Final[Mapping[str, Rounding]] = {
    "int4 g128": in_groups(integers(4), 128),
    "fp8 per channel": fp8,
    "int8 per channel": integers(8),
    "int8 g32": in_groups(integers(8), 32),
    "int4 g128 with zero points": in_groups(shifted_integers(4), 128),
    "nf4": in_groups(nf4, 64),
    "mxfp4": in_groups(mxfp4, 32),
    "nvfp4": nvfp4,
    "int6 g16": in_groups(integers(6), 16),
    "fp8 per tensor": of_whole_matrix(fp8),
    "fp8 blocks of 128": in_blocks(fp8, 128),
    "int8 per tensor": of_whole_matrix(integers(8)),
    "int8 g64": in_groups(integers(8), 64),
    "int8 g128": in_groups(integers(8), 128),
    "int4 g32": in_groups(integers(4), 32),
    "int4 g64": in_groups(integers(4), 64),
    "int4 g32 with zero points": in_groups(shifted_integers(4), 32),
    "int4 g64 with zero points": in_groups(shifted_integers(4), 64),
}


def _of_weights(rounding: Rounding, network: Network) -> Network:
    return with_matrices(network, in_dtype(rounding))


def _of_both(rounding: Rounding, network: Network) -> Network:
    """Weights rounded for each output, and activations for each token."""
    return with_activations(_of_weights(rounding, network), rounding)


_BANK: Final[Mapping[str, Callable[[Network], Network]]] = {
    **{name: partial(_of_weights, rounding) for name, rounding in _WEIGHTS.items()},
    "W8A8 int8": partial(_of_both, integers(8)),
    "W8A8 fp8": partial(_of_both, fp8),
    FP8_CACHE: partial(with_cache, rounding=fp8_unscaled),
}

SUSPECTS: Final = tuple(_BANK)

# What a weight is stored in, by the first word of a name; the KV cache leaves weights as they are.
_WEIGHT_BITS: Final = {
    **{"int8": 8, "fp8": 8, "W8A8": 8, "int6": 6},
    **{"int4": 4, "nf4": 4, "mxfp4": 4, "nvfp4": 4, "KV": 16},
}


def weight_bits(name: str) -> int:
    """Bits of a weight of the suspect ``name``, without scales."""
    return _WEIGHT_BITS[name.split(maxsplit=1)[0]]


def rounding_of(name: str) -> Rounding:
    """How the matrices of a suspect are rounded. Raises KeyError for one that rounds others too."""
    return _WEIGHTS[name]


def suspect(network: Network, name: str) -> Network:
    """``network`` changed as the suspect ``name`` of ``SUSPECTS`` is, or ``SKIPPED``."""
    if name == SKIPPED:
        return without_layers(network, [len(network.shapes) // 2])
    return _BANK[name](network)


def suspects_of(network: Network) -> tuple[str, ...]:
    """The names in ``SUSPECTS`` that are cheaper than ``network`` is published; maybe none.

    Weights must have fewer bits than the published ones; a cache in fp8 is cheaper than one that
    the checkpoint does not declare to be so.
    """

    def is_cheaper(name: str) -> bool:
        if name == FP8_CACHE:
            return network.checkpoint.published.cache is None
        return weight_bits(name) < network.weight_bits

    return tuple(filter(is_cheaper, SUSPECTS))
