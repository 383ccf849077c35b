"""A deployment without a model: a test sets the distance of every cheat from the true vector."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from proofserve.verifier.audit.deployment import AuditedProver, Price
from proofserve.verifier.judges import Recompute, Vectors

WIDTH = 128
# The suspects, and how far each moves a vector, beside the honest distance of 0.01.
HONEST = 0.01
SUSPECTS = {"int8 per channel": 0.008, "int4 g128": 0.1}
# Weights that no suspect predicts, but that change what is rounded.
PRIVATE = "int8 by chance"
# The share of squared errors that honest kernels have in common, so their mean cosine.
SHARED = 0.5


class ToyDeployment:
    """Notes what it is asked for in ``asked``.

    ``apart`` says how far the vectors of a cheat are from the validator's on average, by what it is
    asked for; their errors then have the honest footprint. Those of others are at 1, and point
    anywhere. Nonces ``missing`` get no vector from any prover, and a prover in ``silent`` has no
    vector for any nonce. ``noisy`` is how far one of the two honest kernels is; the other is as far
    as the deployed one.
    """

    names = tuple(SUSPECTS)
    width = WIDTH
    reference = "one kernel"

    def __init__(  # noqa: PLR0917
        self,
        layers: int = 12,
        seq_len: int = 256,
        apart: Mapping[str, float] | None = None,
        missing: Sequence[int] = (),
        silent: Sequence[str] = (),
        noisy: float = HONEST,
        every_position: bool = True,
    ) -> None:
        self.price = Price(768, layers, 12, 4, 64, 3072, seq_len, every_position)
        self.asked: list[object] = []
        kernels = {"one kernel": HONEST, "another kernel": noisy}
        self._apart = {"truth": 0.0, "honest": HONEST, "again": HONEST, **kernels, **(apart or {})}
        self._missing = missing
        self._silent = silent

    def truth(self, nonces: Sequence[int]) -> Vectors:
        return {n: _unit(n, "truth") for n in nonces if n not in self._missing}

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        return {nonce: SUSPECTS[name] * _unit(nonce, name) for nonce in nonces}

    def deployed(self, nonces: Sequence[int]) -> Vectors:
        return self._answers("honest")(nonces)

    def kernels(self) -> Iterator[AuditedProver]:
        for name in ("one kernel", "another kernel"):
            yield AuditedProver(name, 0.0, partial(self._answers, name))

    @property
    def own_again(self) -> AuditedProver:
        return AuditedProver("again", 0.0, partial(self._answers, "again"))

    def weights(self) -> Iterator[AuditedProver]:
        for name, length in {**SUSPECTS, PRIVATE: 0.012}.items():
            saving = self.price.bits(4 if "int4" in name else 8)
            yield AuditedProver(name, saving, lambda n=name, far=length: self._moved(n, far))

    def rotated(self, layers: Sequence[int], finer: Sequence[int]) -> Recompute:
        """Further the more layers, and without the honest footprint."""
        return self._moved(f"rotated {len(layers)} {len(finer)}", HONEST * len(layers))

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
        label = str(asked)
        error = self._honest_error if label in self._apart else _unit

        def answer(nonces: Sequence[int]) -> Vectors:
            return {
                n: _unit(n, "truth")
                + self._apart.get(label, 1.0) * _spread(n, label) * error(n, label)
                for n in self._given(label, nonces)
            }

        return answer

    def _moved(self, name: str, length: float) -> Recompute:
        self.asked.append(name)
        # An apart of 0 leaves the honest vectors alone.
        length *= self._apart.get(name, 1.0)
        error = self._honest_error if name in self._apart else _unit

        def answer(nonces: Sequence[int]) -> Vectors:
            return {
                n: _unit(n, "truth")
                + HONEST * _spread(n, name) * error(n, f"rounding of {name}")
                + length * _unit(n, name)
                for n in self._given(name, nonces)
            }

        return answer

    def _given(self, label: str, nonces: Sequence[int]) -> Sequence[int]:
        return [] if label in self._silent else [n for n in nonces if n not in self._missing]

    @staticmethod
    def _honest_error(nonce: int, label: str) -> NDArray[np.float32]:
        """A part of it is that of every honest kernel."""
        shared, own = np.sqrt([SHARED, 1.0 - SHARED], dtype=np.float32)
        return shared * _unit(nonce, "footprint") + own * _unit(nonce, label)


def _spread(nonce: int, label: str) -> np.float32:
    """Distances differ by a tenth."""
    return np.float32(np.exp(0.1 * _random(nonce, label + " length").normal()))


def _unit(nonce: int, label: str) -> NDArray[np.float32]:
    drawn = _random(nonce, label).normal(size=WIDTH)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _random(nonce: int, label: str) -> np.random.Generator:
    return np.random.default_rng([nonce, *label.encode()])
