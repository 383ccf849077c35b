"""How honest errors and those of suspects point along the suspects' predictions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.direction import Bank, Expected
from proofserve.lab.verify.judges import Vectors
from proofserve.protocol.codec import to_float16
from proofserve.protocol.verdict.direction import HonestSpread, cosine, honest_spread
from proofserve.rounds.calls import chunks

# Of them a deployment with each suspect's weights computes a part: its cosines vary little.
OWN_SHARE = 4
AT_ONCE = 32
# The normal quantile of 0.99.
_Z = 2.33


# Makes of the figures of nonces what they would spread if the nonces were independent.
Widen = Callable[[NDArray[np.float64], Sequence[int]], NDArray[np.float64]]


class DeployableBank(Bank, Protocol):
    """A bank that also knows what a node with a suspect's weights answers."""

    def truth(self, nonces: Sequence[int]) -> Vectors: ...

    def served_by(self, name: str, nonces: Sequence[int]) -> Vectors: ...


@dataclass(frozen=True, slots=True)
class SuspectCosines:
    """Cosines with one suspect's prediction: of honest nonces, and of a node that has its weights.

    ``honest`` bounds the honest spread. ``own`` has a lower bound of the node's mean, wrong 1 time
    in 100, and its standard deviation.
    """

    honest: HonestSpread
    own: Expected


def suspect_cosines(
    bank: DeployableBank, honest: Vectors, progress: Progress, widen: Widen
) -> dict[str, SuspectCosines]:
    """Measure every suspect of ``bank`` on the nonces of ``honest``, an honest node's vectors.

    ``widen`` is for nonces that are alike. Raises EngineFault if a forward fails, and LabError for
    a suspect with the published weights.
    """
    nonces = tuple(honest)
    own_nonces = nonces[: max(2, len(nonces) // OWN_SHARE)]
    progress.step(f"{len(bank.names)} suspects on {len(nonces)} nonces", len(bank.names))
    errors = _less(honest, bank.truth(nonces))
    found = {}
    for name in bank.names:
        predicted: dict[int, NDArray[np.float32]] = {}
        for chunk in chunks(nonces, AT_ONCE):
            predicted |= bank.predictions(name, chunk)
        if not any(vector.any() for vector in predicted.values()):
            raise LabError(f"suspect {name}: its vectors are those of the published weights")
        of_honest = widen(np.array([cosine(errors[n], predicted[n]) for n in nonces]), nonces)
        served = _less(_as_sent(bank.served_by(name, own_nonces)), bank.truth(own_nonces))
        cosines = np.array([cosine(served[n], predicted[n]) for n in own_nonces])
        of_own = widen(cosines, own_nonces)
        sd = float(of_own.std(ddof=1))
        # The lower bound of the mean: what is expected too high would clear a fraud too soon.
        own = Expected(float(of_own.mean()) - _Z * sd / math.sqrt(len(of_own)), sd)
        found[name] = SuspectCosines(honest_spread(of_honest), own)
        progress.advance()
    return found


def _less(vectors: Vectors, truth: Vectors) -> Vectors:
    return {nonce: vector - truth[nonce] for nonce, vector in vectors.items()}


def _as_sent(vectors: Vectors) -> Vectors:
    """Rounded to the float16 of the wire."""
    return {nonce: to_float16(vector).astype(np.float32) for nonce, vector in vectors.items()}
