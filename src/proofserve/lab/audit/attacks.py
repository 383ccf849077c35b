"""The table of attacks: how a prover could make vectors with less work, and what it saves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.compute_share import Price
from proofserve.lab.verify.judges import Recompute, Vectors

# Tokens; a quarter and a half of the sequence are added.
CONTEXTS: Final = (1, 4, 16)
# A prover that skips a quarter of the layers skips every fourth, beginning with the second.
STRIDE: Final = 4
# The weights whose error a prover hides behind noise, and the length of the noise in honest ones.
HIDDEN: Final = "int8 per channel"
NOISES: Final = (1.0, 2.0)


@dataclass(frozen=True, slots=True)
class AuditedProver:
    """A way to make vectors. ``saving`` is the share (0 to 1) of an honest nonce's compute.

    ``prepare`` may take memory and seconds, and returns the function that computes the vectors,
    float32 [width]; a nonce without a finite vector is left out. ``exact`` says that the vectors
    are honest ones, so that no test can tell.
    """

    name: str
    saving: float
    prepare: Callable[[], Recompute]
    exact: bool = False


class AuditedDeployment(Protocol):
    """The audited model, honest and changed to cheat, and its validator.

    ``width`` is the number of values per nonce, ``names`` the validator's suspects. ``has_twins``
    says whether a nonce is a pair of twins.
    """

    @property
    def price(self) -> Price: ...

    @property
    def width(self) -> int: ...

    @property
    def has_twins(self) -> bool: ...

    @property
    def names(self) -> Sequence[str]: ...

    def truth(self, nonces: Sequence[int]) -> Vectors:
        """The vectors as the validator recomputes them."""

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The suspect's vectors less the true ones."""

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        """The vectors of the model as the prover deploys it: our own honest run."""

    def kernels(self) -> Iterator[AuditedProver]:
        """The honest model by other kernels than ``deployed``."""

    def weights(self) -> Iterator[AuditedProver]:
        """Changed weights, activations and caches; those of the suspects have their names."""

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        """The model without the layers of these indices."""

    def some_tokens(self, count: int) -> Recompute:
        """The model that computes ``count`` positions: the last, or the first if all are read."""

    def other_checkpoint(self) -> AuditedProver:
        """A model with other weights, of the same shape or a smaller one."""

    def other_key(self) -> Recompute:
        """The honest model's vectors for another public key."""

    def other_block(self) -> Recompute:
        """The honest model's vectors for another block."""


def attacks(deployment: AuditedDeployment, honest_distance: float) -> Iterator[AuditedProver]:
    """Every attack that makes all its vectors in one way; the nearest to honest vectors first.

    ``honest_distance`` is the mean distance of an honest vector.
    """
    for prover in deployment.weights():
        yield prover
        if prover.name == HIDDEN:
            yield from (_noisy(prover, times, times * honest_distance) for times in NOISES)
    yield from _of_layers(deployment)
    yield from _of_context(deployment)
    yield from _of_others(deployment)
    yield from _forgeries(deployment.width)
    if deployment.price.every_position:
        saving = deployment.price.first_projections
        name = "first layer's projections kept per token"
        yield AuditedProver(name, saving, lambda: deployment.deployed, exact=True)


def _noisy(prover: AuditedProver, times: float, length: float) -> AuditedProver:
    """``prover`` with a random vector of ``length`` added to each of its own."""

    def prepare() -> Recompute:
        plain = prover.prepare()

        def answer(nonces: Sequence[int]) -> Vectors:
            return {
                n: vector + length * _random_unit(n, len(vector))
                for n, vector in plain(nonces).items()
            }

        return answer

    return replace(
        prover, name=f"{prover.name}, noise of {times:g} honest distances", prepare=prepare
    )


def _of_layers(deployment: AuditedDeployment) -> Iterator[AuditedProver]:
    layers = deployment.price.shape.layers

    def attack(name: str, left_out: Sequence[int]) -> AuditedProver:
        saving = deployment.price.without_layers(len(left_out))
        return AuditedProver(name, saving, partial(deployment.without_layers, left_out))

    yield attack("first layer skipped", [0])
    yield attack("middle layer skipped", [layers // 2])
    yield attack("last layer skipped", [layers - 1])
    if layers >= STRIDE:
        yield attack("every fourth layer skipped", range(1, layers, STRIDE))
    yield attack("model skipped", range(layers))


def _of_context(deployment: AuditedDeployment) -> Iterator[AuditedProver]:
    price = deployment.price
    # Later tokens do not change the states of the first, where those are read too.
    which = "first" if price.every_position else "last"
    for count in sorted({*CONTEXTS, price.seq_len // 4, price.seq_len // 2}):
        if 0 < count < price.seq_len:
            tokens = f"{which} token" if count == 1 else f"{which} {count} tokens"
            some = partial(deployment.some_tokens, count)
            yield AuditedProver(f"{tokens} only", price.tokens(count), some)


def _of_others(deployment: AuditedDeployment) -> Iterator[AuditedProver]:
    yield deployment.other_checkpoint()
    # These vectors exist already, so they cost nothing.
    of_next = _of_next_nonce(deployment.deployed)
    yield AuditedProver("another nonce's vectors", 1.0, lambda: of_next)
    yield AuditedProver("another key's vectors", 1.0, deployment.other_key)
    yield AuditedProver("another block's vectors", 1.0, deployment.other_block)


def _of_next_nonce(honest: Recompute) -> Recompute:
    def answer(nonces: Sequence[int]) -> Vectors:
        computed = honest([nonce + 1 for nonce in nonces])
        return {nonce: computed[nonce + 1] for nonce in nonces if nonce + 1 in computed}

    return answer


def _forgeries(width: int) -> Iterator[AuditedProver]:
    def always(vector: NDArray[np.float32]) -> Callable[[], Recompute]:
        return lambda: lambda nonces: dict.fromkeys(nonces, vector)

    def random(nonces: Sequence[int]) -> Vectors:
        return {nonce: _random_unit(nonce, width) for nonce in nonces}

    yield AuditedProver("random unit vectors", 1.0, lambda: random)
    yield AuditedProver("one vector for all", 1.0, always(_unit(np.ones(width))))
    yield AuditedProver("zero vectors", 1.0, always(np.zeros(width, np.float32)))


def _random_unit(nonce: int, width: int) -> NDArray[np.float32]:
    return _unit(np.random.default_rng(nonce).normal(size=width))


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    return (vector / np.linalg.norm(vector)).astype(np.float32)
