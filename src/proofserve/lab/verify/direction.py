"""The direction test over a bank of suspects, with no more forwards than it needs."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Protocol

from proofserve.lab.verify.judges import Chances, Finding, Vectors, evidence_text
from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.direction import (
    CalibratedDirection,
    CertifiedDirection,
    HonestSpread,
    cosine,
)
from proofserve.protocol.verdict.sequential import SequentialResult

# Suspects that are computed for a nonce. With those that the last nonces turn out not to need, an
# honest node costs five.
PER_NONCE = 4
# Suspects that a finding names at most.
NAMED = 3
# Of them the most likely so far.
LIKELY = 2


class Bank(Protocol):
    """Suspected weights by name, and how each would move the results."""

    @property
    def names(self) -> Sequence[str]: ...

    def predictions(self, name: str, nonces: Sequence[int]) -> Vectors:
        """The suspect's vectors less the published model's, float32 [width] each."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The cosines of a prover with a suspect's weights, against that suspect, as calibrated."""

    mean: float
    sd: float


# A suspect that was not calibrated: as int8 in groups of 32 shows on a trained model in the vectors
# of sketch-v1, with the wider spread of those of artifact-v1.
UNKNOWN = Expected(0.4, 0.4)


class Suspicion:
    """One suspect: the evidence for it, and whether it is ruled out."""

    def __init__(self, expected: Expected, honest: HonestSpread | None, clears_at: float) -> None:
        self.nonces = 0
        self._evidence = CalibratedDirection(honest) if honest else CertifiedDirection()
        self._mean = expected.mean
        # A deployment may spread as widely around the expected mean as an honest one around 0.
        self._sd = max(expected.sd, honest.sd if honest else 0.0)
        self._clears_at = clears_at
        # The likelihood ratio of the suspect's cosines over an honest node's, both as normal.
        self.log_ratio = 0.0

    def add(self, c: float) -> None:
        self.nonces += 1
        self._evidence.add(c)
        self.log_ratio += (self._mean * c - self._mean**2 / 2) / self._sd**2

    @property
    def log(self) -> float:
        return self._evidence.log

    @property
    def ruled_out(self) -> bool:
        """Whether the suspect's weights would have shown by now."""
        return self.log_ratio <= -self._clears_at


class DirectionJudge:
    """Convicts by the union bound: each suspect of the bank at its number over alpha.

    With ``honest`` the calibrated form, else the certified one; a suspect that ``honest`` does not
    name gets the widest spread. It clears a node once every suspect is ruled out.

    A nonce is compared with ``PER_NONCE`` suspects, because each costs a forward: at first with
    others for each nonce, in the bank's order, then with the two most likely and others in turn.
    The choice depends on earlier nonces alone, so the evidence stays valid.
    """

    clears = True

    def __init__(
        self,
        bank: Bank,
        expected: Mapping[str, Expected],
        honest: Mapping[str, HonestSpread],
        chances: Chances,
    ) -> None:
        self._bank = bank
        self._form = "calibrated" if honest else "certified"
        self._chances = replace(chances, alpha=chances.alpha / len(bank.names))
        widest = max(honest.values(), key=lambda spread: spread.sd, default=None)
        self._open = {
            name: Suspicion(
                expected.get(name, UNKNOWN), honest.get(name, widest), chances.clears_at
            )
            for name in bank.names
        }
        self._strongest = ("", 0.0)
        self._planned: dict[int, tuple[str, ...]] = {}
        self._predicted: dict[str, Vectors] = {}
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        nonces = [error.nonce for error in errors if error.error is not None]
        self._planned = dict(zip(nonces, self._plan(len(nonces)), strict=True))
        of_name: defaultdict[str, list[int]] = defaultdict(list)
        for nonce, names in self._planned.items():
            for name in names:
                of_name[name].append(nonce)
        self._predicted = {n: self._bank.predictions(n, them) for n, them in of_name.items()}

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the other tests count it.
        if error.error is None:
            return
        self._nonces += 1
        for name in self._planned[error.nonce]:
            if (suspicion := self._open.get(name)) is None:
                continue
            suspicion.add(cosine(error.error, self._predicted[name][error.nonce]))
            self._strongest = max(self._strongest, (name, suspicion.log), key=lambda pair: pair[1])
            if suspicion.ruled_out:
                del self._open[name]

    def finding(self) -> Finding:
        name, log_evidence = self._strongest
        result = SequentialResult.UNDECIDED
        more = f" and {len(self._open) - NAMED} more" if len(self._open) > NAMED else ""
        text = f"not ruled out: {', '.join([*self._open][:NAMED])}{more} ({self._form})"
        if log_evidence >= self._chances.convicts_at:
            result = SequentialResult.FRAUD
            text = f"{name}, {evidence_text(log_evidence)} ({self._form})"
        elif not self._open:
            result = SequentialResult.HONEST
            text = f"all suspects ruled out ({self._form})"
        figures: dict[str, float | str] = {"log_evidence": log_evidence, "suspect": name}
        if self._open:
            figures["log_clearing"] = min(-each.log_ratio for each in self._open.values())
        return Finding("direction", result, self._nonces, text, {**figures, "form": self._form})

    def _plan(self, count: int) -> list[tuple[str, ...]]:
        """The suspects for each of the next ``count`` nonces."""
        seen = [name for name, suspicion in self._open.items() if suspicion.nonces]
        seen.sort(key=lambda name: -self._open[name].log_ratio)
        likely = [name for name in seen[:LIKELY] if self._open[name].log_ratio > 0.0]
        unseen = [name for name in self._open if not self._open[name].nonces]
        others = [*unseen, *(name for name in seen if name not in likely)]
        turn, size = cycle(others), min(PER_NONCE - len(likely), len(others))
        return [(*likely, *islice(turn, size)) for _ in range(count)]
