"""What a validator with the checkpoint knows of an honest engine besides its distances."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.calibrate.dependence import widened
from proofserve.lab.calibrate.direction import DeployableBank, SuspectCosines, suspect_cosines
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Recompute, Vectors
from proofserve.protocol.verdict.scale import ratios_tell_more
from proofserve.rounds.calls import chunks

AT_ONCE = 32


class DeployingValidator(DeployableBank, Protocol):
    """``deployed`` computes its vectors in the dtype that nodes serve."""

    @property
    def rounds_as_deployed(self) -> bool: ...

    def deployed(self, nonces: Sequence[int]) -> Vectors: ...


@dataclass(frozen=True, slots=True)
class CheckpointFigures:
    """``ratios`` float64 [nonces] are as in ``paired_ratios``, None if they tell no more."""

    ratios: NDArray[np.float64] | None
    suspects: Mapping[str, SuspectCosines]


@dataclass(frozen=True, slots=True)
class HonestRun:
    """Vectors of an honest engine and of the float32 reference engine, for the same nonces.

    ``other_kernels`` is false if the honest engine is the reference engine too. ``groups`` says of
    each nonce to which group of nonces that are alike it belongs, None if none are.
    """

    vectors: Vectors
    truth: Vectors
    other_kernels: bool
    groups: Mapping[int, int] | None = None

    def widened(self, values: NDArray[np.float64], nonces: Iterable[int]) -> NDArray[np.float64]:
        """As ``dependence.widened`` the ``values`` of ``nonces``."""
        return values if self.groups is None else widened(values, [self.groups[n] for n in nonces])

    @property
    def distances(self) -> NDArray[np.float64]:
        apart = [np.linalg.norm(self.vectors[n] - self.truth[n]) for n in self.truth]
        return np.array(apart, dtype=np.float64)


def checkpoint_figures(
    validator: DeployingValidator, honest: HonestRun, nonces: int, progress: Progress
) -> CheckpointFigures:
    """The suspects are measured on the first ``nonces``, none of them if it is 0.

    Raises as ``suspect_cosines``.
    """
    ratios = None
    # The reference engine has the validator's own kernels, so its ratios would all be 1.
    if honest.other_kernels and not validator.rounds_as_deployed:
        measured = paired_ratios(honest, validator.deployed, progress)
        ratios = measured if ratios_tell_more(honest.distances, measured) else None
    first = {nonce: honest.vectors[nonce] for nonce in tuple(honest.vectors)[:nonces]}
    widen = honest.widened
    found = suspect_cosines(validator, first, progress, widen) if first else {}
    return CheckpointFigures(ratios, found)


def paired_ratios(
    honest: HonestRun, deployed: Recompute, progress: Progress
) -> NDArray[np.float64]:
    """Each honest distance over that of ``deployed`` for the same nonce: float64 [nonces].

    With groups their logarithms are widened. Raises EngineFault if a forward fails.
    """
    progress.step(f"our own rounding of {len(honest.truth)} nonces", len(honest.truth))
    lengths = []
    for nonces in chunks(tuple(honest.truth), AT_ONCE):
        ours = deployed(nonces)
        for nonce in nonces:
            lengths.append(float(np.linalg.norm(ours[nonce] - honest.truth[nonce])))
            progress.advance()
    ratios = np.log(honest.distances / np.array(lengths))
    wide: NDArray[np.float64] = np.exp(honest.widened(ratios, honest.truth))
    return wide
