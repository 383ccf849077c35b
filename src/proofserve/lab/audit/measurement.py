"""How far the vectors of each prover are from the validator's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.attacks import AuditedProver
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.judges import Recompute, Vectors
from proofserve.protocol.codec import to_float16
from proofserve.protocol.verdict.counting import rate_interval
from proofserve.rounds.computation import chunks

# The largest distance of two vectors of length 1; in figures a missing vector is as far.
FARTHEST = 2.0
# A forgery for the remaining nonces has to save at least this share.
FORGERY_SAVES = 0.90
# Shares of the nonces that a cautious prover forges; it computes the others honestly.
FORGED_SHARES = (0.10, 0.05, 0.02, 0.01, 0.005)
# Nonces of one step of progress.
AT_ONCE = 16

Floats = NDArray[np.float64]
Errors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ProverMeasurement:
    """The vectors of a prover, measured.

    ``errors`` float32 [nonces, width] are its vectors less the validator's, NaN where there is no
    vector. ``rate`` is the share of mismatches by the threshold of the count, ``interval`` its 95 %
    interval. Of a mixture the errors are those of two provers, one after the other, and
    ``chances`` [nonces] says how often each is met; else all are met alike.
    """

    name: str
    saving: float
    errors: Errors
    rate: float
    interval: tuple[float, float]
    exact: bool = False
    chances: Floats | None = None

    @property
    def distances(self) -> Floats:
        """float64 [nonces], infinite where there is no vector."""
        lengths = np.linalg.norm(self.errors, axis=1).astype(np.float64)
        return np.where(np.isnan(lengths), np.inf, lengths)

    @property
    def mean(self) -> float:
        return float(np.average(self._shown, weights=self.chances))

    @property
    def sd(self) -> float:
        spread = np.average((self._shown - self.mean) ** 2, weights=self.chances)
        return float(np.sqrt(spread))

    @property
    def _shown(self) -> Floats:
        return self.distances.clip(max=FARTHEST)


def measured(prover: AuditedProver, errors: Errors, dist_threshold: float) -> ProverMeasurement:
    # The comparison of a validator (protocol B.4) is in float32. A missing vector is too far.
    within = np.linalg.norm(errors, axis=1) <= np.float32(dist_threshold)
    beyond = int((~within).sum())
    return ProverMeasurement(
        name=prover.name,
        saving=prover.saving,
        errors=errors,
        rate=beyond / len(errors),
        interval=rate_interval(beyond, len(errors)),
        exact=prover.exact,
    )


def mixtures(
    honest: ProverMeasurement, forged: Sequence[ProverMeasurement]
) -> list[ProverMeasurement]:
    """Provers that compute most nonces, and forge the rest by the attack that mismatches least.

    A validator draws its sample at random, so that each nonce in it is forged with the same
    chance. Empty if no attack saves ``FORGERY_SAVES``.
    """
    cheap = [each for each in forged if each.saving >= FORGERY_SAVES]
    if not cheap:
        return []
    best = min(cheap, key=lambda each: (each.interval[0], each.mean))
    return [_mixture(honest, best, share) for share in FORGED_SHARES]


def _mixture(
    honest: ProverMeasurement, forged: ProverMeasurement, share: float
) -> ProverMeasurement:
    def mixed(of_honest: float, of_forged: float) -> float:
        return (1.0 - share) * of_honest + share * of_forged

    counts = len(honest.errors), len(forged.errors)
    return ProverMeasurement(
        name=f"honest on {1.0 - share:.1%}, else {forged.name}".replace(".0%", "%"),
        saving=share * forged.saving,
        errors=np.concatenate([honest.errors, forged.errors]),
        rate=mixed(honest.rate, forged.rate),
        interval=(
            mixed(honest.interval[0], forged.interval[0]),
            mixed(honest.interval[1], forged.interval[1]),
        ),
        chances=np.repeat([(1.0 - share) / counts[0], share / counts[1]], counts),
    )


def vectors_by(
    title: str, prepare: Callable[[], Recompute], nonces: Sequence[int], progress: Progress
) -> Vectors:
    progress.step(f"{title}: {len(nonces)} nonces", len(nonces))
    answer = prepare()
    found: dict[int, NDArray[np.float32]] = {}
    for chunk in chunks(nonces, AT_ONCE):
        found |= answer(chunk)
        for _ in chunk:
            progress.advance()
    return found


def errors_of(made: Vectors, truth: Vectors) -> Errors:
    """As a validator sees them, both vectors rounded to float16 as on the wire (protocol B.4)."""
    return np.array([_error(made.get(nonce), vector) for nonce, vector in truth.items()])


def _error(theirs: NDArray[np.float32] | None, ours: NDArray[np.float32]) -> Errors:
    if theirs is None:
        return np.full_like(ours, np.nan)
    theirs, ours = (to_float16(vector).astype(np.float32) for vector in (theirs, ours))
    return theirs - ours
