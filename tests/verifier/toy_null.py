"""Honest kernels that exist only as numbers: how large their errors are, and what they keep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.verifier.judges import BankRun, Variant, Vectors
from proofserve.verifier.noise import RunMeasurement
from proofserve.verifier.populations import (
    HonestPopulations,
    HonestRuns,
    OwnRun,
    RunFigures,
    populations,
    uncalibrated,
)

WIDTH = 128
NAMES = ("int8", "fp8", "int4")
# How far a suspect's weights move results, in honest errors.
REACHES = {"int8": 1.2, "fp8": 5.0, "int4": 25.0}
OTHERS = 1.6
REFERENCE, SECOND = "reference", "second reference"
# The first one under tensor parallelism, which is no reference until none explains a node.
ON_RANKS = "reference on 2 ranks"
ORDERS = (1, 2)
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Kernel:
    """``size`` in that of the reference's errors; ``kept`` is the mean cosine with its runs.

    ``lean`` is a part of every suspect's prediction that the kernel's errors have, too.
    """

    size: float = 1.0
    kept: float = 0.6
    like: str = REFERENCE
    lean: float = 0.0


_OURS = (REFERENCE, SECOND, ON_RANKS)
# A kernel that nobody emulates.
CARD = "a card"
# What a node keeps of a footprint whose weights are others.
LOST = 0.05
# Of a run, what does not depend on the order in which it adds up: two runs are 0.6 alike.
COMMON = 0.6**0.5
SERVER = Kernel()


class ToyBank:
    """Each suspect moves each nonce in a direction of its own; ``kernels`` are emulated ones.

    Both references are among them, and are 0.35 like each other, as is the first on several ranks.
    """

    def __init__(self, kernels: Mapping[str, Kernel], names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.asked: list[tuple[str, int]] = []
        self.expected: list[Mapping[BankRun, Sequence[int]]] = []
        self.ran: set[str | None] = set()
        self.references = (REFERENCE, SECOND)
        self.variants: Mapping[str, Mapping[Variant, str]] = {
            REFERENCE: {Variant(ranks=2): ON_RANKS},
            SECOND: {},
        }
        self.round_activations = False
        self._kernels = kernels

    @property
    def kernels(self) -> Sequence[str]:
        return (*self.references, *self._kernels)

    def expect(self, runs: Mapping[BankRun, Sequence[int]]) -> None:
        self.expected.append({run: tuple(nonces) for run, nonces in runs.items()})

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        self.asked += [(name, nonce) for nonce in nonces]
        return {nonce: self.prediction(name, nonce) for nonce in nonces}

    def prediction(self, name: str, nonce: int) -> Vector:
        drawn = np.random.default_rng([nonce, 5, self.names.index(name)])
        length = 0.01 * REACHES.get(name, OTHERS) * np.exp(drawn.normal(0.0, 0.15))
        return (length * _unit(drawn)).astype(np.float32)

    def errors(self, run: BankRun, nonces: Sequence[int]) -> Vectors:
        self.ran.add(run.kernels)
        if run.kernels in _OURS:
            return {n: self._ours(str(run.kernels), n, run.order or 0) for n in nonces}
        seed = 2 + self.kernels.index(str(run.kernels))
        return self.errors_by(self._kernels[str(run.kernels)], nonces, seed)

    def errors_by(
        self, kernel: Kernel, nonces: Sequence[int], seed: int, served: str | None = None
    ) -> Vectors:
        """The errors of a node with these kernels, which serves a suspect's weights or none."""
        return {n: self._error(kernel, n, seed, served).astype(np.float32) for n in nonces}

    def _error(
        self, kernel: Kernel, nonce: int, seed: int, served: str | None
    ) -> NDArray[np.float64]:
        drawn = np.random.default_rng([nonce, seed, 17])
        kept = LOST if served else kernel.kept
        common = kept / COMMON
        noise = np.sqrt(1 - common**2) * _unit(drawn)
        length = 0.01 * kernel.size * np.exp(drawn.normal(0.0, 0.1))
        made = length * (common * self._direction(kernel.like, nonce) + noise)
        for name in self.names:
            part = 1.0 if name == served else kernel.lean
            made = made + part * self.prediction(name, nonce)
        return made

    def _ours(self, reference: str, nonce: int, order: int) -> Vector:
        of_order = _unit(np.random.default_rng([nonce, 23, order, _OURS.index(reference)]))
        made = COMMON * self._direction(reference, nonce) + np.sqrt(1 - COMMON**2) * of_order
        return (0.01 * made / np.linalg.norm(made)).astype(np.float32)

    def _direction(self, reference: str, nonce: int) -> NDArray[np.float64]:
        first = _unit(np.random.default_rng([nonce, 1]))
        if reference == REFERENCE:
            return first
        if reference == CARD:
            return _unit(np.random.default_rng([nonce, 29]))
        common = 0.35 / COMMON**2
        own = _unit(np.random.default_rng([nonce, 1 + _OURS.index(reference)]))
        other = common * first + np.sqrt(1 - common**2) * own
        return other / np.linalg.norm(other)


def claims(errors: Vectors) -> list[ClaimError]:
    return [ClaimError(nonce, error) for nonce, error in errors.items()]


def measurement(bank: ToyBank, nonces: Sequence[int]) -> RunMeasurement:
    references = {name: bank.errors(BankRun(kernels=name), nonces) for name in bank.references}
    predicted = {name: {n: bank.prediction(name, n) for n in nonces} for name in bank.names}
    return RunMeasurement(tuple(nonces), references, predicted)


def figures(bank: ToyBank, errors: Vectors) -> RunFigures:
    return measurement(bank, tuple(errors)).fields(errors).figures


def gathered(bank: ToyBank, kernels: Mapping[str, Kernel], nonces: int = 200) -> HonestRuns:
    """The runs of a calibration for which these kernels were measured on real servers."""
    known = range(10_000, 10_000 + nonces)
    measured = {
        name: bank.errors_by(kernel, known, 100 + place)
        for place, (name, kernel) in enumerate(kernels.items())
    }
    references = {name: bank.errors(BankRun(kernels=name), known) for name in bank.references}
    beside = measurement(bank, known)
    runs = {name: beside.fields(of).figures for name, of in {**references, **measured}.items()}
    return HonestRuns(runs, set(kernels), beside.lengths, WIDTH)


def toy_null(
    bank: ToyBank, kernels: Mapping[str, Kernel], nonces: int = 200, room: float = 1.0
) -> HonestPopulations:
    """The populations of such a calibration, beside the first reference."""
    return populations(gathered(bank, kernels, nonces), REFERENCE, room)


def own_run(
    bank: ToyBank,
    known: HonestRuns | None,
    said: str | None = None,
    trusted: Mapping[str, Vectors] | None = None,
) -> OwnRun:
    """Our own run of either reference, with what a calibration ``known`` says, or without one.

    ``said`` is the one that the node says it has, None if it says nothing. ``trusted`` are errors
    of other nodes.
    """
    errors = trusted or {}
    first = bank.references if said is None else (said,)
    others = [name for name in (*bank.references, ON_RANKS) if name not in first]

    def null(name: str) -> HonestPopulations:
        if known is None:
            return uncalibrated(name, WIDTH)
        if name in errors:
            return populations(known, REFERENCE).of_node(name, WIDTH)
        if name != ON_RANKS:
            return populations(known, name)
        return populations(known, REFERENCE).on_ranks(name, WIDTH)

    functions = {name: partial(_chosen, of) for name, of in errors.items()}
    return OwnRun(bank, null, first, ORDERS, others, functions)


def _chosen(errors: Vectors, nonces: Sequence[int]) -> Vectors:
    return {nonce: errors[nonce] for nonce in nonces}


def _unit(drawn: np.random.Generator) -> NDArray[np.float64]:
    made = drawn.normal(size=WIDTH)
    return made / np.linalg.norm(made)
