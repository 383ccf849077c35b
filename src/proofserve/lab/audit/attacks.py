"""The table of attacks: how a prover could make vectors with less work, and what it saves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.compute_share import Price
from proofserve.lab.verify.judges import Recompute, Vectors

# Bits of weights that are rounded to integers.
BITS: Final = (8, 6, 4)
FP8: Final = "fp8"
# Tokens; a quarter and a half of the sequence are added.
CONTEXTS: Final = (1, 4, 16)
# A prover that skips a quarter of the layers skips every fourth, beginning with the second.
STRIDE: Final = 4


class AuditedDeployment(Protocol):
    """The audited model, honest and changed to cheat.

    Each method prepares a prover, which may take memory and seconds, and returns the function that
    computes its vectors, float32 [k_dim]. A nonce without a finite vector is left out.
    """

    price: Price
    k_dim: int

    def validator(self) -> Recompute:
        """The model as the validator recomputes it."""

    def honest(self) -> Recompute:
        """The model as the prover deploys it."""

    def rounded(self, precision: int | str) -> Recompute:
        """The model with weights of ``precision`` bits, or ``FP8``."""

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        """The model without the layers of these indices."""

    def last_tokens(self, count: int) -> Recompute:
        """The model that reads only the last ``count`` tokens."""

    def other_checkpoint(self) -> Recompute:
        """A model of the same shape with other weights."""

    def other_key(self) -> Recompute:
        """The honest model's vectors for another public key."""

    def other_block(self) -> Recompute:
        """The honest model's vectors for another block."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to cheat. ``saving`` is the share (0 to 1) of an honest nonce's compute."""

    name: str
    saving: float
    prepare: Callable[[], Recompute]


def attacks(deployment: AuditedDeployment) -> Iterator[Attack]:
    """Every attack that makes all its vectors in one way; the nearest to honest vectors first."""
    yield from _of_weights(deployment)
    yield from _of_layers(deployment)
    yield from _of_context(deployment)
    yield from _of_others(deployment)
    yield from _forgeries(deployment.k_dim)


def _of_weights(deployment: AuditedDeployment) -> Iterator[Attack]:
    price = deployment.price
    for bits in BITS:
        rounded = partial(deployment.rounded, bits)
        yield Attack(f"weights of {bits} bits", price.bits(bits), rounded)
    yield Attack("weights in fp8", price.bits(8), partial(deployment.rounded, FP8))


def _of_layers(deployment: AuditedDeployment) -> Iterator[Attack]:
    layers = deployment.price.shape.layers

    def attack(name: str, left_out: Sequence[int]) -> Attack:
        saving = deployment.price.without_layers(len(left_out))
        return Attack(name, saving, partial(deployment.without_layers, left_out))

    yield attack("first layer skipped", [0])
    yield attack("middle layer skipped", [layers // 2])
    yield attack("last layer skipped", [layers - 1])
    if layers >= STRIDE:
        yield attack("every fourth layer skipped", range(1, layers, STRIDE))
    yield attack("model skipped", range(layers))


def _of_context(deployment: AuditedDeployment) -> Iterator[Attack]:
    price = deployment.price
    for count in sorted({*CONTEXTS, price.seq_len // 4, price.seq_len // 2}):
        if 0 < count < price.seq_len:
            tokens = "last token" if count == 1 else f"last {count} tokens"
            last = partial(deployment.last_tokens, count)
            yield Attack(f"{tokens} only", price.last_tokens(count), last)


def _of_others(deployment: AuditedDeployment) -> Iterator[Attack]:
    yield Attack("another checkpoint", 0.0, deployment.other_checkpoint)
    # These vectors exist already, so they cost nothing.
    yield Attack("another nonce's vectors", 1.0, lambda: _of_next_nonce(deployment.honest()))
    yield Attack("another key's vectors", 1.0, deployment.other_key)
    yield Attack("another block's vectors", 1.0, deployment.other_block)


def _of_next_nonce(honest: Recompute) -> Recompute:
    def answer(nonces: Sequence[int]) -> Vectors:
        computed = honest([nonce + 1 for nonce in nonces])
        return {nonce: computed[nonce + 1] for nonce in nonces if nonce + 1 in computed}

    return answer


def _forgeries(k_dim: int) -> Iterator[Attack]:
    def always(vector: NDArray[np.float32]) -> Callable[[], Recompute]:
        return lambda: lambda nonces: dict.fromkeys(nonces, vector)

    def random(nonces: Sequence[int]) -> Vectors:
        return {nonce: _unit(np.random.default_rng(nonce).normal(size=k_dim)) for nonce in nonces}

    yield Attack("random unit vectors", 1.0, lambda: random)
    yield Attack("one vector for all", 1.0, always(_unit(np.ones(k_dim))))
    yield Attack("zero vectors", 1.0, always(np.zeros(k_dim, np.float32)))


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    return (vector / np.linalg.norm(vector)).astype(np.float32)
