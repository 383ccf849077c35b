"""What ``verify-chat`` and ``watch-chat`` say: lines for a reader, and a record for a program."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from proofserve.lab.chat.verification import ChatOutcome
from proofserve.protocol.verdict.sequential import SequentialResult

WHAT_TO_MEASURE: Final = (
    "No verdict: no honest kernel that is known explains these errors, and no fraud that is known."
    " If a server of this kind is trusted, measure it: proofserve calibrate chat MODEL --url URL"
    " --out FILE"
)


@dataclass(frozen=True, slots=True)
class ChatReport:
    """``origin`` says where the honest figures come from, ``seed`` chose parts of long answers."""

    outcome: ChatOutcome
    origin: str
    seed: str

    def lines(self) -> Iterator[str]:
        outcome = self.outcome
        yield f"{outcome.answers} answers with a receipt checked (seed {self.seed})"
        if outcome.without_receipt:
            of, share = outcome.choices, outcome.without_receipt / outcome.choices
            yield f"{outcome.without_receipt} of {of} answers have no receipt ({share:.0%})"
        for failure in outcome.failures:
            yield f"  {failure.check:9} fraud: {failure.text}"
        for finding in outcome.findings:
            yield f"  {finding.test:9} {finding.result}: {finding.text}"
        for reason in outcome.unknown:
            yield f"  not checked: {reason}"
        if outcome.closest is not None:
            yield f"Closest honest kernel: {outcome.closest}."
        if outcome.verdict is SequentialResult.UNDECIDED:
            yield "More answers are needed: give several files."
        if outcome.verdict is SequentialResult.UNEXPLAINED:
            yield WHAT_TO_MEASURE
        yield f"Honest figures: {self.origin}."

    def record(self) -> dict[str, object]:
        outcome = self.outcome
        return {
            "verdict": outcome.verdict,
            "choices": outcome.choices,
            "answers": outcome.answers,
            "without_receipt": outcome.without_receipt,
            "not_checked": list(outcome.unknown),
            "failures": [asdict(each) for each in outcome.failures],
            "findings": [asdict(each) for each in outcome.findings],
            "closest": outcome.closest,
            "figures_from": self.origin,
            "seed": self.seed,
        }
