"""What honest means: a list of kernels that may serve the model, each with its own figures.

No verdict rests on one idea of honest rounding. The null is "one of these kernels", so a node is
convicted only if every one of them is, and cleared if one of them explains it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.leaning import HonestLean, honest_lean, own_share
from proofserve.protocol.verdict.scale import CONVICTING, REFUTING, ScaleFit, SizeBets, fitted

Floats = NDArray[np.float64]
# The name under which the shares of our own figures have that of the alikeness of twins.
TWINS: Final = "twins"
# Ratios to our errors below this count as this. A kernel in float32 errs a million times less than
# ours, except where a rounding of the wire flips: beside such figures no error would be large.
LEAST_RATIO: Final = 0.1
# Fewer honest nonces bound no spread.
LEAST_LEANING: Final = 8
# The normal quantile of 0.99.
_Z: Final = 2.33


@dataclass(frozen=True, slots=True)
class Expected:
    """The figures of a prover with a suspect's weights, against that suspect, as calibrated."""

    mean: float
    sd: float


# A suspect that was not calibrated: as int8 in groups of 32 shows on a trained model in the vectors
# of sketch-v1, with the wider spread of those of artifact-v1.
UNKNOWN: Final = Expected(0.4, 0.4)


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run of the model showed on the nonces of a calibration.

    ``lengths`` float64 [n] are those of its errors, ``alike`` float64 [n] the cosines of twins'
    errors, None without twins. ``cosines`` are by suspect, float64 [m] with the first m nonces.
    ``rows`` int64 [n] are the places of its nonces among those of the validator's own run.
    """

    lengths: Floats
    alike: Floats | None
    cosines: Mapping[str, Floats]
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OwnShares:
    """How much of our own figure each test takes off; ``leans`` by suspect and ``TWINS``.

    The unit of an error's length is our own run's of the nonce to the power of ``size``. The rest
    of the power is from ``typical``, the geometric mean of our own lengths. With many values in a
    vector a long error of ours says that the nonce feels rounding more, and ``size`` is nearly 1;
    with few it says half as much, and all of it would only add our own noise.
    """

    size: float
    typical: float
    leans: Mapping[str, float]

    def ratios(self, lengths: Floats, own: Floats) -> Floats:
        """The figures of sizes: ``lengths`` [n] in this unit, ``own`` [n] of the same nonces."""
        unit = own**self.size * self.typical ** (1.0 - self.size)
        ratios: Floats = np.maximum(lengths / unit, LEAST_RATIO)
        return ratios

    @property
    def suspects(self) -> tuple[str, ...]:
        """Those whose leaning was measured."""
        return tuple(name for name in self.leans if name != TWINS)

    def lean(self, suspect: str) -> float:
        """For a suspect that was not measured the share in the middle of the others."""
        others = [self.leans[name] for name in self.suspects]
        return self.leans.get(suspect, float(np.median(others)) if others else 1.0)


class Population:
    """The honest figures of one kernel, beside the validator's ``own`` ones of the same nonces.

    ``groups`` int64 number the nonces that are alike, by their rows; None if none are. ``room``
    widens all bounds. Raises ProtocolError for too few figures.
    """

    def __init__(
        self,
        name: str,
        run: RunFigures,
        own: RunFigures,
        shares: OwnShares,
        groups: NDArray[np.int64] | None = None,
        room: float = 1.0,
    ) -> None:
        self.name = name
        self._groups = None if groups is None else groups[run.rows]
        logs = np.log(shares.ratios(run.lengths, own.lengths[run.rows]))
        self.ratios = np.exp(self._widened(logs))
        self.room = room
        self.fit: ScaleFit = fitted(self.ratios)
        self.convicting = SizeBets(self.fit, self.ratios, CONVICTING * room)
        self.refuting = SizeBets(self.fit, self.ratios, REFUTING * room)
        self.leans: dict[str, HonestLean] = {}
        if run.alike is not None and own.alike is not None:
            figures = run.alike - shares.leans[TWINS] * own.alike[run.rows]
            self.leans[TWINS] = self._lean(figures, shares.leans[TWINS])
        for suspect, cosines in run.cosines.items():
            if len(cosines) >= LEAST_LEANING:
                ours = own.cosines[suspect][run.rows[: len(cosines)]]
                figures = cosines - shares.leans[suspect] * ours
                self.leans[suspect] = self._lean(figures, shares.leans[suspect])

    @cached_property
    def widest(self) -> HonestLean | None:
        """For a suspect that was not measured; None if none was."""
        leans = [lean for name, lean in self.leans.items() if name != TWINS]
        return max(leans, key=lambda lean: lean.sd, default=None)

    def lean(self, suspect: str) -> HonestLean | None:
        return self.leans.get(suspect, self.widest)

    def _lean(self, figures: Floats, share: float) -> HonestLean:
        return honest_lean(self._widened(figures), share).wider(self.room)

    def _widened(self, figures: Floats) -> Floats:
        if self._groups is None:
            return figures
        return widened(figures, self._groups[: len(figures)].tolist())


@dataclass(frozen=True, slots=True)
class HonestPopulations:
    """All kernels of a calibration; ``members`` are never empty.

    ``expected`` are the figures of provers with each suspect's weights. ``without`` gives the same
    with a member left out.
    """

    members: Sequence[Population]
    shares: OwnShares
    expected: Mapping[str, Expected]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def has_twins(self) -> bool:
        return all(TWINS in member.leans for member in self.members)

    def widest_sd(self, suspect: str) -> float:
        leans = (member.lean(suspect) for member in self.members)
        return max((lean.sd for lean in leans if lean is not None), default=0.0)

    def without(self, name: str) -> "HonestPopulations":
        kept = [member for member in self.members if member.name != name]
        return HonestPopulations(kept, self.shares, self.expected)


def populations(
    own: RunFigures,
    honest: Mapping[str, RunFigures],
    cheats: Mapping[str, Floats],
    groups: NDArray[np.int64] | None = None,
    room: float = 1.0,
) -> HonestPopulations:
    """The null of a calibration: ``honest`` runs by name, and what each suspect's prover showed.

    ``cheats`` are cosines float64 [m], of our first m nonces. Raises ProtocolError for too few.
    """
    shares = _own_shares(own, honest)
    members = [Population(name, run, own, shares, groups, room) for name, run in honest.items()]
    expected = {}
    for name, cosines in cheats.items():
        figures = cosines - shares.leans[name] * own.cosines[name][: len(cosines)]
        sd = float(figures.std(ddof=1))
        # A lower bound of the mean: what is expected too high would clear a fraud too soon.
        expected[name] = Expected(float(figures.mean()) - _Z * sd / len(figures) ** 0.5, sd)
    return HonestPopulations(members, shares, expected)


def _own_shares(own: RunFigures, honest: Mapping[str, RunFigures]) -> OwnShares:
    """The shares with which these honest runs differ least."""
    leans = {}
    for suspect, ours in own.cosines.items():
        found = [(run.cosines[suspect], run) for run in honest.values() if suspect in run.cosines]
        pairs = [(cosines, ours[run.rows[: len(cosines)]]) for cosines, run in found]
        leans[suspect] = own_share(pairs)
    if own.alike is not None:
        alike = own.alike
        pairs = [(r.alike, alike[r.rows]) for r in honest.values() if r.alike is not None]
        leans[TWINS] = own_share(pairs)
    lengths = [(run.lengths, own.lengths[run.rows]) for run in honest.values()]
    sizes = [(np.log(np.maximum(of, LEAST_RATIO * ours)), np.log(ours)) for of, ours in lengths]
    return OwnShares(own_share(sizes), float(np.exp(np.log(own.lengths).mean())), leans)


def widened(values: Floats, groups: Sequence[int]) -> Floats:
    """``values`` [n] as far from their mean as sums over groups need: float64 [n].

    Tests multiply the evidence of values as if they were independent. A sum of m values of a group
    that correlate by r has 1 + (m - 1) r times the variance of independent ones (L. Kish, Survey
    Sampling, 1965, section 5.4), so each deviation grows by the square root of it. r is that of a
    one-way analysis of variance; values that repel each other stay as they are.
    """
    numbers = np.unique(np.array(groups), return_inverse=True)[1]
    sizes = np.bincount(numbers).astype(np.float64)
    count, of_groups = len(values), len(sizes)
    if of_groups < 2 or count == of_groups or np.ptp(values) == 0.0:
        return values
    means = np.bincount(numbers, weights=values) / sizes
    overall = float(values.mean())
    between = float((sizes * (means - overall) ** 2).sum()) / (of_groups - 1)
    within = float(((values - means[numbers]) ** 2).sum()) / (count - of_groups)
    # The size that unequal groups count for.
    size = (count - float((sizes**2).sum()) / count) / (of_groups - 1)
    correlation = (between - within) / (between + (size - 1.0) * within)
    largest = float(sizes.max())
    factor = math.sqrt(max(1.0, 1.0 + (largest - 1.0) * correlation))
    made: Floats = overall + factor * (values - overall)
    return made
