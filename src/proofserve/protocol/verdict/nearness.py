"""Whether a node is as near to nodes that we trust as these are to each other.

Nothing is recomputed here: the references are vectors of other nodes, and what is honest is how far
these are from each other (``docs/native.md``, "Judged by other nodes"). A node is compared with the
reference that is farthest from the others, because it may have a card that none of them has.
"""

import math
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.errors import ProtocolError

Floats = NDArray[np.float64]
# Of nonces, among those of the references.
Places = slice | Sequence[int]

# So many references show which of them is odd. Two only differ from each other.
ENOUGH: Final = 3
# Fewer nonces have no quartiles.
LEAST_NONCES: Final = 24
# How many times as far from the references as the farthest of them an honest node may be, by the
# kinds of card that they are on. Among six emulated kernels on nine small models the median was up
# to 1.31 times beside three kinds, 1.53 beside two, and 3.4 beside one kernel in three orders of
# sums; of nine deployments on GPUs 1.19 beside several cards. So one kind convicts by no distance.
_HONEST_BEYOND: Final = {2: 1.75, 3: 1.4}
# What is cleared has not errors in all nonces that put it so much farther away, nor in half of them
# such that it is twice as far.
CLEARED_WITHIN: Final = 1.25
_TWICE, HALF = 2.0, 0.5
# A reference that is so many times as far from the others as these are from each other is no
# witness: an honest one was 1.7 times (a B200 beside two A100), one that serves 4 bits 2.4 times.
_ODD: Final = 2.0
# The part of a nonce's own noise in its unit: all of it would add the references' own chance.
_OWN_NOISE: Final = 0.5
# Distances are at least this part of the references' usual one: equal bits are not infinitely near.
_LEAST_DISTANCE: Final = 0.05
_LEVELS: Final = (0.25, 0.5, 0.75)
_SHARES_OF_LEVELS: Final = np.diff([0.0, *_LEVELS, 1.0])
# How much likelier each next quartile is, by a bet.
_FARTHER, _NEARER = (1.5, 3.0, 6.0), (1 / 1.3, 1 / 1.7, 1 / 2.5, 1 / 4)
# Parts of a liar's share of distances beyond a limit that an honest node has, by a bet.
_PARTS: Final = (0.1, 0.3, 0.6)

# Direction: honest errors may lean so much towards a suspect's, by the kinds of card of the
# references. Beside one kernel all others lean the same way: in emulations by 0.45 on average, and
# by 0.27 beside two kinds. So one kind convicts by no direction.
_HONEST_LEAN: Final = {2: 0.3, 3: 0.2}
# Their cosines may spread so many times as far as those of the references; without enough of these
# by a third.
_SPREAD, _USUAL_SPREAD = 1.15, 1.0 / 3.0
_BETS: Final = np.array([1.0, 2.0, 4.0])
# A suspect whose own errors would lean less than this cannot be told from an honest node.
_LEAST_LEAN: Final = 0.3
# Errors of other kernels with the suspect's weights lean somewhat less than its own do.
_OF_ITS_LEAN: Final = 0.8
_LOG_CAP: Final = math.log(1000.0)


class ReferenceVectors:
    """Vectors of ``k`` trusted nodes about the same ``n`` nonces: float64 [k, n, width].

    They are known to be on so many ``kinds`` of card; beside less than two nothing convicts. Raises
    ProtocolError, which names the field, for less than two nodes, too few nonces, and nodes that
    all give the same vectors.
    """

    def __init__(self, vectors: Floats, kinds: int = 1) -> None:
        if len(vectors) < 2:
            raise ProtocolError("references", "at least two are needed")
        if vectors.shape[1] < LEAST_NONCES:
            text = f"{vectors.shape[1]} common nonces are too few, {LEAST_NONCES} are needed"
            raise ProtocolError("nonces", text)
        self.vectors = vectors
        self.kinds = kinds
        # An honest node may be this many times as far as the farthest reference.
        self.honest_beyond = _HONEST_BEYOND.get(min(kinds, ENOUGH), math.inf)
        # Its errors may have this mean cosine with a suspect's; none is above 1.
        self.honest_lean = _HONEST_LEAN.get(min(kinds, ENOUGH), 1.0)
        pairs = [np.linalg.norm(a - b, axis=-1) for a, b in combinations(vectors, 2)]
        usual = float(np.median(pairs))
        if usual == 0.0:
            raise ProtocolError("references", "all have the same vectors: they are one witness")
        self._least = _LEAST_DISTANCE * usual
        noise = np.log(np.maximum(np.max(pairs, axis=0), self._least))
        self._unit = _OWN_NOISE * noise + (1.0 - _OWN_NOISE) * noise.mean()
        # How far each reference is from the others, float64 [k, n].
        self.apart = np.array([self.farness(v, without=i) for i, v in enumerate(vectors)])

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def are_of_one_kind(self) -> bool:
        """Whether nothing convicts, as they do not show how far another kind of card may be."""
        return self.kinds < min(_HONEST_BEYOND)

    @property
    def are_enough(self) -> bool:
        """Whether distances say something. With two references either may be the one far off."""
        return len(self) >= ENOUGH

    def odd(self) -> int | None:
        """The reference that is much farther from the others than these are; None if none is."""
        if not self.are_enough:
            return None
        beyond = [
            float(np.median(far) - np.median(self._among([v for v in range(len(self)) if v != i])))
            for i, far in enumerate(self.apart)
        ]
        farthest = int(np.argmax(beyond))
        return farthest if beyond[farthest] > math.log(_ODD) else None

    def _among(self, some: Sequence[int]) -> Floats:
        """How far these references are from each other: float64 [n]."""
        pairs = combinations(self.vectors[list(some)], 2)
        found: Floats = np.mean([self._logs(a - b) for a, b in pairs], axis=0) - self._unit
        return found

    def _logs(self, differences: Floats) -> Floats:
        lengths = np.linalg.norm(differences, axis=-1)
        found: Floats = np.log(np.maximum(lengths, self._least))
        return found

    def _others(self, places: Places, without: int | None) -> list[Floats]:
        return [each[places] for i, each in enumerate(self.vectors) if i != without]

    def farness(
        self, vectors: Floats, places: Places = slice(None), without: int | None = None
    ) -> Floats:
        """How far a node's ``vectors`` [n, width] at ``places`` are from the references: [n].

        It is the mean logarithm of the distances from each reference, but for one ``without``, in
        the unit of the nonce.
        """
        logs = [self._logs(vectors - each) for each in self._others(places, without)]
        found: Floats = np.mean(logs, axis=0) - self._unit[places]
        return found

    def nearest(self, vectors: Floats, places: Places) -> int:
        """The reference with the smallest median distance from ``vectors`` [m, width]."""
        away = np.linalg.norm(vectors - self.vectors[:, places], axis=-1)
        return int(np.median(away, axis=1).argmin())

    def leaning(
        self,
        vectors: Floats,
        suspect: Floats,
        places: Places = slice(None),
        without: int | None = None,
    ) -> Floats:
        """How much a node's errors point where a suspect's do: mean cosines, float64 [n].

        ``vectors`` and ``suspect`` [n, width] are of the nonces at ``places``. Each is beside two
        different references, so that their own errors are not in both.
        """
        pairs = permutations(self._others(places, without), 2)
        found: Floats = np.mean([_cosines(vectors - a, suspect - b) for a, b in pairs], axis=0)
        return found


def _cosines(one: Floats, other: Floats) -> Floats:
    """Of rows [n, width]; 0 where one has no length."""
    lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
    inner = (one * other).sum(axis=-1)
    found: Floats = np.divide(inner, lengths, out=np.zeros_like(inner), where=lengths > 0.0)
    return found


class FarnessBets:
    """What the farness of nonces says: factors of evidence, for convicting and for clearing.

    ``apart`` float64 [k, n] is how far each reference is from the others, and an honest node may be
    ``beyond`` times as far as the farthest. The bets look at its quartiles alone, so that rare
    honest nonces that are far off say no more than others beyond the third. Raises ProtocolError
    without enough references.
    """

    def __init__(self, apart: Floats, beyond: float) -> None:
        if len(apart) < ENOUGH:
            raise ProtocolError("references", f"distances need {ENOUGH} of them")
        quartiles = np.quantile(apart, _LEVELS, axis=1).max(axis=1)
        self._beyond = quartiles + math.log(beyond)
        self._within = quartiles + math.log(CLEARED_WITHIN)
        self._twice = quartiles[1] + math.log(_TWICE)
        # Half of the nonces that are forged so are beyond it, of the others as many as of the
        # nearest reference.
        usual = float((apart > self._twice).mean(axis=1).min())
        self._by_liar = HALF / 2 + (1.0 - HALF) * usual

    def convicting(self, farness: Floats) -> Floats:
        """Log factors of ``farness`` [n], infinite without a vector, for each bet: [n, 3]."""
        return _stepped(farness, self._beyond, _FARTHER)

    def against_all(self, farness: Floats) -> Floats:
        """Log factors against a lie in all nonces: [n, 4]."""
        return _stepped(farness, self._within, _NEARER)

    def against_half(self, farness: Floats) -> Floats:
        """Log factors against a lie in half of the nonces: [n, 3]."""
        honest, liar = self._by_liar * np.array(_PARTS), self._by_liar
        is_beyond = (farness > self._twice)[:, np.newaxis]
        found: Floats = np.where(
            is_beyond, np.log(honest / liar), np.log((1.0 - honest) / (1.0 - liar))
        )
        return found


def _stepped(farness: Floats, limits: Floats, times: tuple[float, ...]) -> Floats:
    """By how many of the quartiles each is beyond: [n, bets].

    A bet says that each next quartile is so many ``times`` as likely. As it grows with every
    quartile, or falls, whatever is less far, or farther, than the limits has a mean of 1 at most.
    """
    powers = np.arange(len(_SHARES_OF_LEVELS))
    tilted = np.array([_SHARES_OF_LEVELS * each**powers for each in times])
    steps = np.log(tilted / tilted.sum(axis=1, keepdims=True) / _SHARES_OF_LEVELS)
    found: Floats = steps[:, (farness[:, np.newaxis] > limits).sum(axis=1)].T
    return found


class LeaningBets:
    """What the leaning of nonces towards one suspect says.

    ``suspect`` are its vectors [n, width]. Convicting, a bet of b has the factor
    exp(b (c - l) - b^2 s^2 / 2), below 1 on average for cosines c that lean less than l and spread
    by s.
    """

    def __init__(self, references: ReferenceVectors, suspect: Floats) -> None:
        vectors = references.vectors
        among = np.median([((a - b) ** 2).sum(axis=-1) for a, b in combinations(vectors, 2)])
        away = np.median(((suspect - vectors) ** 2).sum(axis=-1))
        # The part of its errors that its weights make, and not the kernels.
        self._lean = _OF_ITS_LEAN * max(0.0, 1.0 - float(among / away)) if away > 0.0 else 0.0
        self._honest_lean = references.honest_lean
        self._spread = _USUAL_SPREAD
        if references.are_enough:
            each = [references.leaning(v, suspect, without=i) for i, v in enumerate(vectors)]
            self._spread = _SPREAD * float(np.std(each, axis=1).max())

    @property
    def is_unseen(self) -> bool:
        """Whether the suspect is as near to the references as they are to each other."""
        return self._lean < _LEAST_LEAN

    def convicting(self, cosines: Floats) -> Floats:
        """Log factors of ``cosines`` [n] for each bet: [n, 3]."""
        leaning = cosines[:, np.newaxis] - self._honest_lean
        found: Floats = _BETS * leaning - (_BETS * self._spread) ** 2 / 2
        return found

    def log_ratios(self, cosines: Floats) -> Floats:
        """Of the suspect over an honest node: float64 [n]."""
        ratios: Floats = self._lean * (cosines - self._lean / 2) / self._spread**2
        return ratios.clip(-_LOG_CAP, _LOG_CAP)
