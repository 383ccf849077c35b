"""The tests of errors beside our own run: where they point, and whether they are too long.

The direction test asks a bank of suspects, with no more forwards than it needs. Lengths come first.
A suspect whose weights would have made an error far longer than it is needs no forward of its own:
it is ruled out in this nonce once it is known how far its predictions reach.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.directions import Compared, Footprint, Reach, reach
from proofserve.protocol.verdict.evidence import log_path, mixed
from proofserve.protocol.verdict.scale import CONVICTING
from proofserve.verifier.judges import (
    BankRun,
    Chances,
    Figures,
    Judge,
    KernelBank,
    Vector,
    Vectors,
    evidence_text,
    few,
    result_of,
)
from proofserve.verifier.populations import LEAST_REACH, OwnRun

Floats = NDArray[np.float64]
# Suspects that are computed for a nonce.
PER_NONCE: Final = 4
# If no calibration says a suspect's reach, one nonce does where it moves the result by this much of
# an honest error. Where it moves it less, and might be too little to be tested, two nonces do.
_SEEN_AT_ONCE: Final = 2 * LEAST_REACH
# A suspect is computed for a nonce if the length of the error says at least this for it, as a
# logarithm: less is as good as ruled out.
_IN_REACH: Final = -2.3
# Before a suspect convicts, honest kernels are asked to explain the nonces that speak for it, a few
# at a time, because the first ones may be enough.
_ASKED_AT_ONCE: Final = 4
NO_SUSPECTS: Final = "there are no suspects: the checkpoint is published as cheap as the whole bank"


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """What the nonces so far say of one suspect.

    ``compared`` are the errors beside its predictions, of some nonces. ``path`` is the evidence for
    it after each of these that honest kernels do not explain, ``clearing`` that for its innocence.
    """

    reach: Reach | None
    compared: Compared
    path: Floats
    clearing: float

    @property
    def is_unseen(self) -> bool:
        """Whether its weights move results less than honest rounding does."""
        return self.reach is not None and self.reach.log_mean < np.log(LEAST_REACH)

    @property
    def convicting(self) -> float:
        return float(self.path.max())


class _ErrorJudge(Judge[ClaimError]):
    """Judges errors beside our own run.

    The run may become another one, so all that was judged is weighed after each nonce.
    """

    def __init__(self, own: OwnRun, chances: Chances) -> None:
        self._own = own
        self._chances = chances
        # The nonces that were judged, and the lengths of their errors.
        self._judged: list[int] = []
        self._lengths: list[float] = []

    def plan(self, nonces: Sequence[int]) -> None:
        self._own.expect(nonces)

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        self._own.compare(errors)

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        self._judged.append(error.nonce)
        self._lengths.append(error.distance)


class DirectionJudge(_ErrorJudge):
    """Convicts by the union bound: each suspect of the bank at its number over alpha.

    It clears a node once every suspect is ruled out on the share. ``suspects`` are all of the bank
    for None. A suspect convicts only by what no emulated honest kernel explains in the same nonces.
    """

    name = "direction"

    def __init__(
        self, bank: KernelBank, own: OwnRun, chances: Chances, suspects: Sequence[str] | None = None
    ) -> None:
        suspects = bank.names if suspects is None else suspects
        super().__init__(own, replace(chances, alpha=chances.alpha / len(suspects)))
        self._bank = bank
        # By suspect, of the nonces that were judged, and of those that are judged next.
        self._predicted: dict[str, dict[int, Vector]] = {name: {} for name in suspects}
        self._prepared: dict[str, Vectors] = {}
        # What honest kernels explain of a nonce, by the reference beside which it is judged.
        self._explained: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._found: dict[str, _Suspicion] = {}

    def plan(self, nonces: Sequence[int]) -> None:
        super().plan(nonces)
        known = self._own.honest.reaches
        # In the pass of the published weights one nonce says how far a suspect reaches.
        new = (n for n, of in self._predicted.items() if not of and n not in known)
        self._bank.expect({BankRun(name): nonces[:1] for name in new})

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        super().prepare(errors)
        self._weigh()
        wanted: defaultdict[str, list[int]] = defaultdict(list)
        for error in errors:
            if error.error is not None:
                for name in self._needed(error, wanted):
                    wanted[name].append(error.nonce)
        self._bank.expect({BankRun(name): of for name, of in wanted.items()})
        self._prepared = {n: self._bank.predictions(n, of) for n, of in wanted.items()}

    def _needed(self, error: ClaimError, planned: Mapping[str, Sequence[int]]) -> list[str]:
        """The suspects to compute for a nonce: the likeliest, and one nonce of unknown reach."""
        unknown, within, honest = [], [], self._own.honest
        ratio = self._own.ratios([error.nonce], [error.distance])
        for name, of in self._found.items():
            if of.reach is None:
                if name not in planned:
                    unknown.append(name)
            elif not of.is_unseen and of.reach.log_ratio(honest.lengths, ratio)[0] > _IN_REACH:
                within.append(name)

        def unlikely(name: str) -> tuple[float, int]:
            of = self._found[name]
            return -of.path[-1], len(of.compared.ratios) + len(planned.get(name, ()))

        # The likeliest first; of the others those that were compared least.
        return [*unknown, *sorted(within, key=unlikely)[:PER_NONCE]]

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the test of sizes counts it.
        if error.error is None:
            return
        super().add(error)
        for name, of in self._prepared.items():
            if error.nonce in of:
                self._predicted[name][error.nonce] = of[error.nonce]
        self._weigh()
        for name in self._predicted:
            self._explain(name)

    def _weigh(self) -> None:
        ratios = self._own.ratios(self._judged, self._lengths)
        self._found = {name: self._suspicion(name, ratios) for name in self._predicted}

    def _suspicion(self, name: str, ratios: Floats) -> _Suspicion:
        """By all nonces that were judged, with ``ratios`` of errors [n]."""
        honest, predicted = self._own.honest, self._predicted[name]
        explained = self._explained[self._own.reference]
        has = np.array([nonce in predicted for nonce in self._judged], dtype=bool)
        nonces = [nonce for nonce in self._judged if nonce in predicted]
        compared = self._own.compared(nonces, predicted)
        known, seen = honest.reaches.get(name), compared.predicted
        if len(seen) > 1 or (seen >= _SEEN_AT_ONCE).any():
            known = reach(seen)
        # Lengths speak for the other nonces, once it is known how far the suspect reaches.
        logs = np.zeros(len(ratios)) if known is None else known.log_ratio(honest.lengths, ratios)
        logs[has] = compared.log_ratio(honest.lengths)
        by_honest = np.array([explained.get(nonce, 0.0) for nonce in nonces])
        path = log_path(compared.log_factors(honest.lengths.wider(CONVICTING), by_honest))
        return _Suspicion(known, compared, path, -float(mixed(logs, self._chances.share).sum()))

    def _explain(self, name: str) -> None:
        """Ask honest kernels about the nonces that speak for a suspect, as long as it convicts."""
        explained = self._explained[self._own.reference]
        wide = self._own.honest.lengths.wider(CONVICTING)
        while self._convicts(name):
            for_it = self._found[name].compared.log_factors(wide).max(axis=1).tolist()
            nonces = [nonce for nonce in self._judged if nonce in self._predicted[name]]
            open_ = {n: log for n, log in zip(nonces, for_it, strict=True) if log > 0.0}
            asked = sorted(open_.keys() - explained, key=open_.__getitem__)[-_ASKED_AT_ONCE:]
            if not asked:
                return
            explained |= self._own.explained(asked, wide)
            self._found[name] = self._suspicion(name, self._own.ratios(self._judged, self._lengths))

    def _convicts(self, name: str) -> bool:
        return self._found[name].convicting >= self._chances.convicts_at

    def result(self) -> SequentialResult:
        convicts = any(map(self._convicts, self._found))
        return result_of(convicts=convicts, clears=bool(self._found) and not self._open)

    @property
    def _open(self) -> list[str]:
        """Suspects that are not ruled out, and could be."""
        needed, seen = self._chances.clears_at, self._found.items()
        return [name for name, of in seen if not of.is_unseen and of.clearing < needed]

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        unseen = [name for name, of in self._found.items() if of.is_unseen]
        # The suspect with the most evidence.
        found = ((of.convicting, name) for name, of in self._found.items())
        log_evidence, name = max(found, default=(0.0, ""))
        figures: dict[str, float | str] = {"log_evidence": log_evidence, "suspect": name}
        if open_ := self._open:
            figures["log_clearing"] = min(self._found[each].clearing for each in open_)
        text = f"not ruled out: {few(open_)}"
        if result is SequentialResult.FRAUD:
            text = f"{name}, {evidence_text(log_evidence)}"
        elif result is SequentialResult.HONEST:
            text = "all suspects ruled out"
        if unseen:
            text += f"; {few(unseen)} moves results less than honest rounding, so is not tested"
        return text, figures


class FootprintJudge(_ErrorJudge):
    """Asks whether errors have the footprint of an honest kernel; it clears, and cannot convict.

    Servers with kernels that were not measured have less of it, or none. A server in float32 errs
    so little that its vectors are the published ones: they count as if they had a usual footprint.
    """

    name = "footprint"

    def _figures(self, of: Footprint) -> Floats:
        ratios = self._own.ratios(self._judged, self._lengths)
        return of.figures(self._own.cosines(self._judged), ratios)

    def _clearing(self, of: Footprint) -> float:
        """The evidence that a node has it, against lies on the share and on all nonces."""
        figures, chances = self._figures(of), self._chances
        return float(of.log_clearing(figures, chances.share, chances.kept).sum(axis=0).min())

    def result(self) -> SequentialResult:
        every, chances = self._own.honest.footprints.values(), self._chances
        cleared = any(self._clearing(of) >= chances.clears_at for of in every)
        against = [log_path(of.log_refuting(self._figures(of))).max() for of in every]
        lost = bool(against) and min(against) >= chances.convicts_at
        return SequentialResult.UNEXPLAINED if lost else result_of(clears=cleared)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        shown, every = self._own.cosines(self._judged), self._own.honest.footprints
        pointing = shown[~np.isnan(shown)]
        mean = float(pointing.mean()) if len(pointing) else 0.0
        kernel = self._own.honest.closest(mean)
        expected, exact = every[kernel].mean, len(shown) - len(pointing)
        figures: dict[str, float | str] = {"log_clearing": self._clearing(every[kernel])}
        figures |= {"mean": mean, "expected": expected, "kernel": kernel, "exact": exact}
        if result is SequentialResult.HONEST:
            figures["excluded_share"] = self._chances.share
        text = f"errors have {mean:.2f} of {expected:.2f} expected of the footprint of {kernel}"
        if exact:
            near = f"{exact} of {len(shown)} vectors are the published ones, as float32 gives them"
            text = f"{near}; other {text}" if len(pointing) else near
        return text, figures


class PairedJudge(_ErrorJudge):
    """Bets on errors that are larger than honest ones, beside our ``own`` of the nonce.

    A nonce in which rounding weighs more than in others makes both long. It cannot clear: a lie
    need not have long errors. A claim without a vector is infinitely far.
    """

    name = "paired"
    clears = False

    def result(self) -> SequentialResult:
        return result_of(convicts=self._log_evidence >= self._chances.convicts_at)

    @property
    def _ratios(self) -> Floats:
        """Where an honest error may be as long as that of any trusted node."""
        return self._own.ratios(self._judged, self._lengths, trusted=True)

    @property
    def _log_evidence(self) -> float:
        """Against the kernel that explains the errors best."""
        ratios = self._ratios
        found = (log_path(each.sizes.log_factors(ratios)).max() for each in self._own.members)
        return float(min(found, default=0.0))

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        log_evidence = self._log_evidence
        text = f"errors are {np.median(self._ratios):.2g} times ours (median)"
        if result is SequentialResult.FRAUD or log_evidence > 0.0:
            text = f"{text}, {evidence_text(log_evidence)}"
        return text, {"log_evidence": log_evidence}
