"""Honest kernels that exist only as numbers: how large their errors are, and how these lean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.leaning import cosine
from proofserve.protocol.verdict.twins import alikeness
from proofserve.verifier.judges import OWN, BankRun, Vectors
from proofserve.verifier.populations import HonestPopulations, RunFigures, populations

K = 32
WIDTH = 2 * K
NAMES = ("int8", "fp8", "int4")
# How far the errors of a node with a suspect's weights point along its prediction.
LEANS = {"int8": 0.6, "fp8": 0.9, "int4": 0.99}
OTHERS_OWN = 0.8
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kernel:
    """``size`` in that of our own errors; ``alike`` and ``lean`` are mean cosines."""

    size: float = 1.0
    alike: float = 0.2
    lean: float = 0.0


class ToyBank:
    """Each suspect moves each nonce in a direction of its own; ``kernels`` are emulated ones."""

    def __init__(self, kernels: Mapping[str, Kernel], names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.asked: list[tuple[str, int]] = []
        self.expected: list[Mapping[BankRun, Sequence[int]]] = []
        self._kernels = kernels

    @property
    def kernels(self) -> Sequence[str]:
        return tuple(self._kernels)

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        self.expected.append({run: tuple(nonces) for run, nonces in runs.items()})

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        self.asked += [(name, nonce) for nonce in nonces]
        return {nonce: self.direction(name, nonce) for nonce in nonces}

    def direction(self, name: str, nonce: int) -> Vector:
        return _unit(np.random.default_rng([nonce, self.names.index(name)]), WIDTH)

    def own_errors(self, nonces: Sequence[int]) -> Vectors:
        return self.errors_by(Kernel(), nonces, seed=1)

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        if run.kernels == OWN.kernels:
            return self.own_errors(nonces)
        seed = 2 + self.kernels.index(run.kernels)
        return self.errors_by(self._kernels[run.kernels], nonces, seed)

    def errors_by(
        self, kernel: Kernel, nonces: Sequence[int], seed: int, served: str | None = None
    ) -> Vectors:
        """The errors of a node with these kernels, which serves a suspect's weights or none."""
        return {n: self._error(kernel, n, seed, served).astype(np.float32) for n in nonces}

    def _error(
        self, kernel: Kernel, nonce: int, seed: int, served: str | None
    ) -> NDArray[np.float64]:
        drawn = np.random.default_rng([nonce, seed, 17])
        shared = drawn.normal(size=K)
        twins = [
            np.sqrt(kernel.alike) * shared + np.sqrt(1 - kernel.alike) * drawn.normal(size=K)
            for _ in range(2)
        ]
        noise = np.concatenate(twins)
        noise = noise / np.linalg.norm(noise) * np.exp(drawn.normal(0.0, 0.1))
        leans = (
            {served: LEANS.get(served, OTHERS_OWN)}
            if served
            else dict.fromkeys(self.names, kernel.lean)
        )
        made = noise
        for name, c in leans.items():
            made = made + c / np.sqrt(1 - c * c) * self.direction(name, nonce)
        # Rounding is as long in any case, changed weights come on top.
        return 0.01 * kernel.size * (made if served else made / np.linalg.norm(made))


def claims(errors: Vectors) -> list[ClaimError]:
    return [ClaimError(nonce, error) for nonce, error in errors.items()]


def figures(bank: ToyBank, errors: Vectors) -> RunFigures:
    nonces = tuple(errors)
    predicted = {name: bank.predictions(name, nonces) for name in bank.names}
    return RunFigures(
        lengths=np.array([np.linalg.norm(errors[n]) for n in nonces], dtype=np.float64),
        alike=np.array([alikeness(errors[n]) for n in nonces]),
        cosines={
            name: np.array([cosine(errors[n], vectors[n]) for n in nonces])
            for name, vectors in predicted.items()
        },
        rows=np.arange(len(nonces)),
    )


def toy_null(
    bank: ToyBank, kernels: Mapping[str, Kernel], nonces: int = 200, room: float = 1.0
) -> HonestPopulations:
    """The populations of a calibration that measured these kernels."""
    measured = range(10_000, 10_000 + nonces)
    own = figures(bank, bank.own_errors(measured))
    runs = {
        name: figures(bank, bank.errors_by(kernel, measured, 100 + place))
        for place, (name, kernel) in enumerate(kernels.items())
    }
    cheats = {}
    for name in bank.names:
        served = bank.errors_by(Kernel(), measured[:48], 200, served=name)
        moved = bank.predictions(name, measured[:48])
        cheats[name] = np.array([cosine(served[n], moved[n]) for n in served])
    bank.asked.clear()
    return populations(own, runs, cheats, room=room)


def _unit(drawn: np.random.Generator, count: int) -> Vector:
    made = drawn.normal(size=count).astype(np.float32)
    return made / np.linalg.norm(made)
