"""A deployment without a model: a test sets the distance of every cheat from the true vector."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from proofserve.verifier.audit.deployment import AuditedProver, Price
from proofserve.verifier.judges import Recompute, Vectors

# Two twins of 64 values each.
WIDTH = 128
# The suspects, and how far each moves a vector, beside the honest distance of 0.01.
HONEST = 0.01
SUSPECTS = {"int8 per channel": 0.008, "int4 g128": 0.1}
# Weights that no suspect predicts, but that move both twins alike.
PRIVATE = "int8 by chance"


class ToyDeployment:
    """Notes what it is asked for in ``asked``.

    ``apart`` says how far the vectors of a cheat are from the validator's on average, by what it is
    asked for; 1 if it says nothing. Nonces ``missing`` get no vector from any prover, and a prover
    in ``silent`` has no vector for any nonce. ``noisy`` is how far one of the two honest kernels
    is; the other is as far as our own run.
    """

    names = tuple(SUSPECTS)
    width = WIDTH

    def __init__(  # noqa: PLR0917
        self,
        layers: int = 12,
        seq_len: int = 256,
        apart: Mapping[str, float] | None = None,
        missing: Sequence[int] = (),
        silent: Sequence[str] = (),
        noisy: float = HONEST,
        has_twins: bool = True,
    ) -> None:
        self.price = Price(768, layers, 12, 4, 64, 3072, seq_len, has_twins)
        self.has_twins = has_twins
        self.asked: list[object] = []
        kernels = {"one kernel": HONEST, "another kernel": noisy}
        self._apart = {"truth": 0.0, "honest": HONEST, **kernels, **(apart or {})}
        self._missing = missing
        self._silent = silent

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return {n: _unit(n, "truth") for n in nonces if n not in self._missing}

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return {nonce: SUSPECTS[name] * _alike(nonce, name) for nonce in nonces}

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        return self._answers("honest")(nonces)

    def kernels(self) -> Iterator[AuditedProver]:
        for name in ("one kernel", "another kernel"):
            yield AuditedProver(name, 0.0, partial(self._answers, name))

    def weights(self) -> Iterator[AuditedProver]:
        for name, length in {**SUSPECTS, PRIVATE: 0.012}.items():
            saving = self.price.bits(4 if "int4" in name else 8)
            yield AuditedProver(name, saving, lambda n=name, far=length: self._moved(n, far))

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        return self._answers(list(left_out))

    def some_tokens(self, count: int) -> Recompute:
        return self._answers(count)

    def other_checkpoint(self) -> AuditedProver:
        return AuditedProver("another checkpoint", 0.0, lambda: self._answers("other checkpoint"))

    def other_key(self) -> Recompute:
        return self._answers("other key")

    def other_block(self) -> Recompute:
        return self._answers("other block")

    def _answers(self, asked: object) -> Recompute:
        self.asked.append(asked)
        apart = self._apart.get(str(asked), 1.0)

        def answer(nonces: Sequence[int]) -> Vectors:
            given = () if str(asked) in self._silent else nonces
            return {
                n: _unit(n, "truth") + apart * _spread(n, str(asked)) * _unit(n, str(asked))
                for n in given
                if n not in self._missing
            }

        return answer

    def _moved(self, name: str, length: float) -> Recompute:
        self.asked.append(name)
        # An apart of 0 leaves the honest vectors alone.
        length *= self._apart.get(name, 1.0)
        honest = self.deployed

        def answer(nonces: Sequence[int]) -> Vectors:
            given = () if name in self._silent else nonces
            return {n: vector + length * _alike(n, name) for n, vector in honest(given).items()}

        return answer


def _alike(nonce: int, label: str) -> NDArray[np.float32]:
    """A unit vector whose halves are equal, as wrong weights move twins."""
    half = _unit(nonce, label)[: WIDTH // 2]
    return np.tile(half / np.linalg.norm(half), 2) / np.float32(np.sqrt(2))


def _spread(nonce: int, label: str) -> np.float32:
    """Distances differ by a tenth."""
    return np.float32(np.exp(0.1 * _random(nonce, label + " length").normal()))


def _unit(nonce: int, label: str) -> NDArray[np.float32]:
    drawn = _random(nonce, label).normal(size=WIDTH)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _random(nonce: int, label: str) -> np.random.Generator:
    return np.random.default_rng([nonce, *label.encode()])
