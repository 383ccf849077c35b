"""A deployment without a model: a test sets the distance of every cheat from the honest vector."""

from collections.abc import Mapping, Sequence

import numpy as np

from proofserve.lab.audit.compute_share import ModelShape, Price
from proofserve.lab.verify.verification import Recompute, Vectors

K_DIM = 12


class ToyDeployment:
    """Notes what it is asked for in ``asked``.

    ``apart`` says how far the vectors of a cheat are from the validator's, by what it is asked
    for: a fixed distance; 1 if it says nothing. Nonces ``missing`` get no vector from any
    prover, and a prover in ``silent`` has no vector for any nonce.
    """

    def __init__(
        self,
        layers: int = 12,
        seq_len: int = 256,
        apart: Mapping[str, float] | None = None,
        missing: Sequence[int] = (),
        silent: Sequence[str] = (),
    ) -> None:
        self.price = Price(ModelShape(768, layers, 12, 4, 64, 3072), seq_len)
        self.k_dim = K_DIM
        self.asked: list[object] = []
        self._apart = {"validator": 0.0, "honest": 0.01, **(apart or {})}
        self._missing = missing
        self._silent = silent

    def validator(self) -> Recompute:
        return self._answers("validator")

    def honest(self) -> Recompute:
        return self._answers("honest")

    def rounded(self, precision: int | str) -> Recompute:
        return self._answers(f"{precision} bits")

    def without_layers(self, left_out: Sequence[int]) -> Recompute:
        return self._answers(list(left_out))

    def last_tokens(self, count: int) -> Recompute:
        return self._answers(count)

    def other_checkpoint(self) -> Recompute:
        return self._answers("other checkpoint")

    def other_key(self) -> Recompute:
        return self._answers("other key")

    def other_block(self) -> Recompute:
        return self._answers("other block")

    def _answers(self, asked: object) -> Recompute:
        self.asked.append(asked)
        apart = self._apart.get(str(asked), 1.0)

        def answer(nonces: Sequence[int]) -> Vectors:
            given = () if str(asked) in self._silent else nonces
            return {n: _turned(n, apart) for n in given if n not in self._missing}

        return answer


def _turned(nonce: int, apart: float) -> np.ndarray:
    """The unit vector of ``nonce``, turned until it is ``apart`` from where it was."""
    axes = np.linalg.qr(np.random.default_rng(nonce).normal(size=(K_DIM, 2)))[0]
    angle = 2.0 * np.arcsin(apart / 2.0)
    return (np.cos(angle) * axes[:, 0] + np.sin(angle) * axes[:, 1]).astype(np.float32)
