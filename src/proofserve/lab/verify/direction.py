"""The direction test over a bank of suspects, with no more forwards than it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


# A suspect that was not calibrated: as little as int8 in groups of 32 shows on trained models.
UNKNOWN = Expected(0.3, 0.2)


class Suspicion:
    """One suspect: the evidence for it, and whether it is ruled out."""

    def __init__(self, expected: Expected, honest: HonestSpread | None, clears_at: float) -> None:
        self.certified = CertifiedDirection()
        self.calibrated = CalibratedDirection(honest) if honest else None
        self._expected = expected
        self._clears_at = clears_at
        # The likelihood ratio of the suspect's cosines over an honest node's, both as normal.
        self._ratio = 0.0

    def add(self, c: float) -> None:
        self.certified.add(c)
        if self.calibrated:
            self.calibrated.add(c)
        mean, sd = self._expected.mean, self._expected.sd
        self._ratio += (mean * c - mean**2 / 2) / sd**2

    @property
    def log(self) -> float:
        return self.calibrated.log if self.calibrated else self.certified.log

    @property
    def ruled_out(self) -> bool:
        """Whether the suspect's weights would have shown by now. It only saves forwards."""
        return self._ratio <= -self._clears_at


class DirectionJudge:
    """Convicts by the union bound: each suspect of the bank at its number over alpha.

    With ``honest`` the calibrated form, else the certified one; a suspect that ``honest`` does not
    name gets the widest spread. It clears a node once every suspect is ruled out.
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
        self._chances = Chances(chances.alpha / len(bank.names), chances.beta)
        clears_at = self._chances.clears_at
        widest = max(honest.values(), key=lambda spread: spread.sd, default=None)
        self._open = {
            name: Suspicion(expected.get(name, UNKNOWN), honest.get(name, widest), clears_at)
            for name in bank.names
        }
        self._strongest = ("", 0.0)
        self._predicted: dict[str, Vectors] = {}
        self._nonces = 0

    def prepare(self, errors: Sequence[ClaimError]) -> None:
        nonces = [error.nonce for error in errors if error.error is not None]
        self._predicted = {name: self._bank.predictions(name, nonces) for name in self._open}

    def add(self, error: ClaimError) -> None:
        # A claim without a vector has no direction; the other tests count it.
        if error.error is None:
            return
        self._nonces += 1
        for name, suspicion in list(self._open.items()):
            suspicion.add(cosine(error.error, self._predicted[name][error.nonce]))
            self._strongest = max(self._strongest, (name, suspicion.log), key=lambda pair: pair[1])
            if suspicion.ruled_out:
                del self._open[name]

    def finding(self) -> Finding:
        name, log_evidence = self._strongest
        result = SequentialResult.UNDECIDED
        text = f"{len(self._open)} suspects not ruled out ({self._form})"
        if log_evidence >= self._chances.convicts_at:
            result = SequentialResult.FRAUD
            text = f"{name}, {evidence_text(log_evidence)} ({self._form})"
        elif not self._open:
            result = SequentialResult.HONEST
            text = f"all suspects ruled out ({self._form})"
        figures: dict[str, float | str] = {
            "log_evidence": log_evidence,
            "suspect": name,
            "form": self._form,
        }
        return Finding("direction", result, self._nonces, text, figures)
