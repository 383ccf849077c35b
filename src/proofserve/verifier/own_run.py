"""Our own honest run, beside which all tests of errors judge a node.

Which run that is, the node's errors decide: one that we emulate, or that of a node that we trust.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.footprint import cosine, emulated_footprint
from proofserve.protocol.verdict.scale import ScaleFit
from proofserve.protocol.verdict.suspicion import Compared, explained
from proofserve.verifier.judges import KEPT_IN_ALL, BankRun, KernelBank, Recompute, Vector, Vectors
from proofserve.verifier.populations import (
    HIDES,
    LEAST_FIGURES,
    HonestPopulations,
    Population,
    measured_here,
)

# Nonces after which a node without a footprint may have that of other kernels or of several ranks,
# and of them those on which all of these are tried.
_LOOKED_AT, _TRIED_ON = 9, 3
# A reference that is so many standard deviations behind is none: with less a node of SmolLM2 got
# another kernel's, and no verdict, 9 times in 100.
_BEHIND: Final = 2.0


def lacks_footprint(mean: float, nonces: int, width: int) -> bool:
    """Whether a ``mean`` cosine is less than what is cleared of an emulation, and not by chance."""
    known = emulated_footprint(width)
    return mean < KEPT_IN_ALL * known.mean - _BEHIND * known.sd / math.sqrt(nonces)


@dataclass(slots=True)
class _Beside:
    """A reference's run in the first order: lengths of its errors, cosines with the node's.

    ``figures`` are means of the node's cosines with the run in every order, ``twins`` cosines of
    the runs in two orders; a reference that never led has none. All are by nonce.
    """

    lengths: dict[int, float] = field(default_factory=dict)
    cosines: dict[int, float] = field(default_factory=dict)
    figures: dict[int, float] = field(default_factory=dict)
    twins: dict[int, float] = field(default_factory=dict)

    @property
    def likeness(self) -> float:
        return float(np.mean(list(self.cosines.values())))


class OwnRun:
    """The validator's own honest run, beside which all tests judge a node.

    Its ``reference`` is the one of ``references`` whose errors are most like the node's so far;
    those that are too far behind are computed no more. Where none has a footprint, ``trusted``
    nodes take its place, of whose errors there is a function each; where these have none either,
    ``others`` are tried. ``null`` says what honest means beside it. It adds up in ``orders`` that
    no node knew when it published, or a liar could have exactly our errors where it does not lie:
    in one, or in two, whose mean cosine spreads less. (The order of a trusted node may be known.)
    """

    def __init__(
        self,
        bank: KernelBank,
        null: Callable[[str], HonestPopulations],
        references: Sequence[str],
        orders: Sequence[int | None] = (None,),
        others: Sequence[str] = (),
        trusted: Mapping[str, Recompute] | None = None,
    ) -> None:
        self._bank = bank
        self._orders = orders
        self._others = others
        self._null = null
        self._beside = {name: _Beside() for name in references}
        self._errors_of = trusted or {}
        self._trusted = {name: _Beside() for name in self._errors_of}
        self._theirs: dict[int, Vector] = {}
        self._honest: HonestPopulations | None = None
        self._measured: Sequence[Population] = ()
        self.reference = references[0]

    @property
    def honest(self) -> HonestPopulations:
        """Raises ReportedError as ``null``."""
        if self._honest is None:
            found, twins = self._null(self.reference), self._beside[self.reference].twins
            width = min(map(len, self._theirs.values()), default=0)
            self._honest = found.expecting([*twins.values()], width) if twins else found
        return self._honest

    @property
    def members(self) -> Sequence[Population]:
        """The kernels whose lengths convict: of a calibration, else those of trusted nodes."""
        return self.honest.members or self._measured

    def expect(self, nonces: Sequence[int]) -> None:
        runs = [(name, self._orders[0]) for name in self._beside]
        if self._theirs or len(self._beside) == 1:
            # Only the reference that leads is run in every order.
            runs += [(self.reference, order) for order in self._orders]
        self._expect(runs, nonces)

    def _expect(self, runs: Iterable[tuple[str, int | None]], nonces: Sequence[int]) -> None:
        emulated = [BankRun(kernels=n, order=o) for n, o in runs if n not in self._trusted]
        self._bank.expect(dict.fromkeys(emulated, nonces))

    def _errors(self, name: str, nonces: Sequence[int], order: int | None = None) -> Vectors:
        """Of a trusted node, or of our run in the first order unless it is said."""
        if name in self._trusted:
            return self._errors_of[name](nonces)
        order = self._orders[0] if order is None else order
        return self._bank.errors(BankRun(kernels=name, order=order), nonces)

    def compare(self, theirs: Sequence[ClaimError]) -> None:
        """Compute ours of the nonces of ``theirs`` that have a vector. Raises EngineFault."""
        known = self._theirs
        new = {e.nonce: e.error for e in theirs if e.error is not None and e.nonce not in known}
        if not new:
            return
        if len(known) >= _LOOKED_AT and self._lacks(self._beside[self.reference]):
            self._look_at_others()
        self._theirs |= new
        for name, of in {**self._trusted, **self._beside}.items():
            self._see(name, of, tuple(new))
        likeness = {name: of.likeness for name, of in self._beside.items()}
        self.reference = max(likeness, key=likeness.__getitem__)
        # By chance a cosine of v values has a variance of 1 / v, a difference of two twice that.
        values = sum(map(len, self._theirs.values()))
        least = likeness[self.reference] - _BEHIND * math.sqrt(2.0 / values)
        self._beside = {name: of for name, of in self._beside.items() if likeness[name] >= least}
        self._compare_in_every_order()
        self._honest = None
        self._measured = [
            measured_here(name, np.array([self.ratio(*each) for each in of.lengths.items()]))
            for name, of in self._trusted.items()
            if name != self.reference and len(of.lengths) >= LEAST_FIGURES
        ]

    def _see(self, name: str, of: _Beside, nonces: Sequence[int]) -> None:
        for nonce, ours in self._errors(name, nonces).items():
            of.lengths[nonce] = float(np.linalg.norm(ours))
            of.cosines[nonce] = cosine(self._theirs[nonce], ours)

    def _lacks(self, of: _Beside) -> bool:
        width = min(map(len, self._theirs.values()))
        return lacks_footprint(of.likeness, len(of.cosines), width)

    def _look_at_others(self) -> None:
        """Add trusted nodes whose footprint the node has, and that hide no lies; else others.

        Of these a few nonces are tried first, and then all. Beside too few ranks two kernels are
        about as unlike the node: so all of them are tried.
        """
        ours = self._beside[self.reference].lengths
        trusted = {
            name: of
            for name, of in self._trusted.items()
            if not self._lacks(of)
            and float(np.median([of.lengths[n] / ours[n] for n in ours])) <= HIDES
        }
        if trusted:
            self._beside |= trusted
            return
        others, self._others = self._others, ()
        nonces = tuple(self._theirs)
        first, rest = nonces[:_TRIED_ON], nonces[_TRIED_ON:]
        self._expect([(name, self._orders[0]) for name in others], first)
        for name in others:
            self._beside[name] = _Beside()
            for some in (first, rest):
                self._see(name, self._beside[name], some)
                if self._lacks(self._beside[name]):
                    del self._beside[name]
                    break

    def _compare_in_every_order(self) -> None:
        """Of the nonces that lack it: all, where another reference leads than before."""
        of, theirs = self._beside[self.reference], self._theirs
        lacking = tuple(nonce for nonce in of.cosines if nonce not in of.figures)
        orders = self._orders[:1] if self.reference in self._trusted else self._orders
        first, *others = (self._errors(self.reference, lacking, order) for order in orders)
        for nonce in lacking:
            again = [cosine(theirs[nonce], other[nonce]) for other in others]
            of.figures[nonce] = float(np.mean([of.cosines[nonce], *again]))
            for other in others:
                of.twins[nonce] = cosine(first[nonce], other[nonce])

    def cosine(self, nonce: int) -> float:
        """Of the node's error with ours; 0 for a claim without a vector, which has no footprint."""
        return self._beside[self.reference].figures.get(nonce, 0.0)

    def compared(self, nonce: int, other: Vector) -> Compared:
        """The node's error of a nonce beside ``other``, in the honest unit."""
        theirs = self._theirs[nonce]
        ratios = (self.ratio(nonce, float(np.linalg.norm(each))) for each in (theirs, other))
        return Compared(*np.array([*ratios, cosine(theirs, other)])[:, np.newaxis])

    def explained(self, nonces: Sequence[int], fit: ScaleFit) -> Mapping[int, float]:
        """As ``explained`` of honest runs: of the references, and without a calibration of all.

        And of trusted nodes. Raises EngineFault.
        """
        bank, calibrated = self._bank, bool(self.honest.members)
        known = bank.references if calibrated else bank.kernels
        names = sorted({*known, *self._trusted, self.reference})
        self._expect([(name, self._orders[0]) for name in names], nonces)
        errors = [self._errors(name, nonces) for name in names]
        return {
            n: float(explained([self.compared(n, of[n]) for of in errors], fit)[0]) for n in nonces
        }

    def ratio(self, nonce: int, length: float) -> float:
        """A ``length`` of one of the nonces that were compared, in the honest unit.

        Infinite lengths, of claims without a vector, need no such nonce.
        """
        return self._in_unit(length, self._beside[self.reference].lengths.get(nonce, 1.0))

    def excess(self, nonce: int, length: float) -> float:
        """The same, where an honest error may be as long as that of any trusted node."""
        every = (self._beside[self.reference], *self._trusted.values())
        return self._in_unit(length, max(of.lengths.get(nonce, 1.0) for of in every))

    def _in_unit(self, length: float, own: float) -> float:
        return float(self.honest.unit.ratios(np.array([length]), np.array([own]))[0])
