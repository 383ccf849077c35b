"""What each measured nonce of a prover gives to each test's evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

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

    ``pairs`` are the honest distances, ``fit`` is of them, and ``paired`` of their ratios to the
    validator's own, None if the paired test cannot be run. A suspect that ``spreads`` lacks gets
    the widest of them; without any the direction test is the certified one.
    """

    fit: ScaleFit
    paired: ScaleFit | None
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
    ``paired`` and ``twins`` are None where the validator has no such test.
    """

    distances: Floats
    # [n, bets], and [n, 2 or 3] to clear: by size, and by the twins where there are any.
    scale: Floats
    paired: Floats | None
    clearing: Floats
    # [n, S, bets]: the calibrated and the certified form.
    direction: Floats
    certified: Floats
    # [n, S]: evidence against the suspect; it is ruled out where this has grown far enough.
    innocence: Floats
    # [n, bets].
    twins: Floats | None

    def followed_by(self, other: "Increments") -> "Increments":
        """The rows of both, which have the same tests."""
        rows: dict[str, Any] = {}
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            rows[field.name] = None if ours is None else np.concatenate([ours, theirs])
        return Increments(**rows)


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

    ``own`` [n, width] are the errors of the validator's own run in the served dtype; ``twins`` says
    whether the scheme's nonces have any.
    """

    def __init__(
        self, honest: HonestFigures, predictions: Mapping[str, Errors], own: Errors, twins: bool
    ) -> None:
        self.honest = honest
        self.predictions = predictions
        self._own_lengths = np.linalg.norm(own, axis=1).astype(np.float64)
        self._own_alike = alike(own) if twins else None

    def increments(self, errors: Errors) -> Increments:
        """Those of a prover with these ``errors`` [n, width], NaN where there is no vector."""
        fit, paired = self.honest.fit, self.honest.paired
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
        ratios = distances / self._own_lengths if paired else distances
        clearing = [(paired or fit).log_clearing(ratios)]
        if self._own_alike is not None:
            by_twins = twin_log_clearing(alike(errors), self._own_alike)
            clearing.append(_without(broken, by_twins)[:, np.newaxis])
        return Increments(
            distances=distances,
            scale=fit.log_factors(distances),
            paired=paired.log_factors(ratios) if paired else None,
            clearing=np.concatenate(clearing, axis=1),
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
