"""What each measured nonce of a prover gives to each test's evidence."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.audit.measurement import Errors, Floats
from proofserve.lab.verify.direction import UNKNOWN, Expected
from proofserve.protocol.verdict.direction import (
    HonestSpread,
    calibrated_log_factors,
    certified_log_factors,
    cosine,
)
from proofserve.protocol.verdict.scale import ScaleFit
from proofserve.protocol.verdict.twins import alikeness, twin_log_clearing, twin_log_factors


@dataclass(frozen=True, slots=True)
class HonestFigures:
    """What a calibration knows: of distances, and of cosines with each suspect's prediction.

    ``pairs`` are the honest distances. A suspect that ``spreads`` lacks gets the widest of them;
    without any the direction test is the certified one.
    """

    fit: ScaleFit
    pairs: tuple[float, ...]
    expected: Mapping[str, Expected]
    spreads: Mapping[str, HonestSpread]

    def spread(self, name: str) -> HonestSpread:
        known = self.spreads.get(name)
        return known or max(self.spreads.values(), key=lambda spread: spread.sd)


@dataclass(frozen=True, slots=True)
class Increments:
    """Logarithms of factors, a row for each nonce; ``S`` is the number of suspects.

    A nonce without a vector is infinitely far, and gives nothing to the tests of directions.
    ``twins`` is None where the validator has no twins test.
    """

    distances: Floats
    # [n, bets], and [n, tests] to clear by the scale test, and by the twins where there are any.
    scale: Floats
    clearing: Floats
    # [n, S, bets]: the calibrated and the certified form.
    direction: Floats
    certified: Floats
    # [n, S]: evidence against the suspect; it is ruled out where this has grown far enough.
    innocence: Floats
    # [n, bets].
    twins: Floats | None

    def followed_by(self, other: "Increments") -> "Increments":
        """The rows of both."""
        twins = None
        if self.twins is not None and other.twins is not None:
            twins = np.concatenate([self.twins, other.twins])
        return Increments(
            distances=np.concatenate([self.distances, other.distances]),
            scale=np.concatenate([self.scale, other.scale]),
            clearing=np.concatenate([self.clearing, other.clearing]),
            direction=np.concatenate([self.direction, other.direction]),
            certified=np.concatenate([self.certified, other.certified]),
            innocence=np.concatenate([self.innocence, other.innocence]),
            twins=twins,
        )


def cosines(errors: Errors, predictions: Mapping[str, Errors]) -> Floats:
    """float64 [n, S]; NaN for a nonce without a vector."""
    columns = [
        [cosine(e, p) for e, p in zip(errors, predicted, strict=True)]
        for predicted in predictions.values()
    ]
    found = np.array(columns, dtype=np.float64).reshape(len(predictions), len(errors)).T
    found[np.isnan(errors).any(axis=1)] = np.nan
    return found


def alike(errors: Errors) -> Floats:
    """The cosines of the twins' errors, float64 [n]."""
    return np.array([alikeness(error) for error in errors])


class NonceEvidence:
    """``predictions`` are by suspect, float32 [n, width] each.

    ``own_alike`` [n] are ``alike`` of the validator's own run in the served dtype, None if the
    validator has no twins test.
    """

    def __init__(
        self, honest: HonestFigures, predictions: Mapping[str, Errors], own_alike: Floats | None
    ) -> None:
        self.honest = honest
        self.predictions = predictions
        self._own_alike = own_alike

    def increments(self, errors: Errors) -> Increments:
        """Those of a prover with these ``errors`` [n, width], NaN where there is no vector."""
        fit = self.honest.fit
        broken = np.asarray(np.isnan(errors).any(axis=1))
        lengths = np.linalg.norm(np.nan_to_num(errors), axis=1).astype(np.float64)
        distances = np.where(broken, np.inf, lengths)
        c = cosines(errors, self.predictions)
        columns = list(zip(self.predictions, c.T, strict=True))
        certified = [certified_log_factors(each) for _, each in columns]
        calibrated = certified
        if self.honest.spreads:
            spread = self.honest.spread
            calibrated = [calibrated_log_factors(each, spread(name)) for name, each in columns]
        clearing = [fit.log_clearing(distances)]
        if self._own_alike is not None:
            by_twins = twin_log_clearing(alike(errors), self._own_alike)
            clearing.append(_without(broken, by_twins))
        return Increments(
            distances=distances,
            scale=fit.log_factors(distances),
            clearing=np.stack(clearing, axis=1),
            direction=_without(broken, np.stack(calibrated, axis=1)),
            certified=_without(broken, np.stack(certified, axis=1)),
            innocence=_without(broken, self._innocence(c)),
            twins=self._twins(errors, broken),
        )

    def _twins(self, errors: Errors, broken: NDArray[np.bool_]) -> Floats | None:
        if self._own_alike is None:
            return None
        return _without(broken, twin_log_factors(alike(errors), self._own_alike))

    def _innocence(self, c: Floats) -> Floats:
        honest, names = self.honest, list(self.predictions)
        expected = [honest.expected.get(name, UNKNOWN) for name in names]
        mean = np.array([each.mean for each in expected])
        # As ``DirectionJudge``, which clears by it.
        spread = [honest.spread(name).sd if honest.spreads else 0.0 for name in names]
        sd = np.maximum([each.sd for each in expected], spread)
        against: Floats = -(mean * c - mean**2 / 2) / sd**2
        return against


def _without(broken: NDArray[np.bool_], factors: Floats) -> Floats:
    """``factors`` [n, ...] with 0, which changes nothing, where there is no vector."""
    found = factors.copy()
    found[broken] = 0.0
    return found
