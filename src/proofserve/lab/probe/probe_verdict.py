"""What the findings of all tests say together, in the words of a customer."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proofserve.lab.probe.diagnosis import OTHER_SURPRISE, Diagnosis
from proofserve.lab.verify.judges import Chances, Finding
from proofserve.protocol.verdict.sequential import SequentialResult

# Errors so many times our own rounding, or tokens so much less likely than drawn ones (nats each),
# or so large a share of greedy tokens that are not the model's: no rounding in 8 bits does it.
OTHER_RATIO: Final = 5.0
OTHER_SHARE: Final = 0.3
# Evidence (a natural logarithm) that shows where a test is going.
_LIKELY: Final = 3.0
# More prompts than this are never.
_MOST: Final = 1e6
# Without this share of judged answers no endpoint is honest: it may have spoilt the others.
LEAST_JUDGED: Final = 0.5

UNEXPLAINED: Final = "no honest kernel that is emulated explains the answers, and no known weights"


class Label(StrEnum):
    HONEST = "honest"
    OTHER_MODEL = "another model"
    QUANTISED = "quantised"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """``suspect`` names the weights of a QUANTISED endpoint; ``text`` is the verdict in words."""

    result: SequentialResult
    label: Label
    suspect: str | None
    text: str


def judged(result: SequentialResult, seen: Diagnosis, more: str) -> ProbeVerdict:
    """``more`` says what an undecided probe needs."""
    if result is SequentialResult.HONEST:
        return ProbeVerdict(result, Label.HONEST, None, "honest: the answers are the checkpoint's")
    if result is SequentialResult.UNEXPLAINED:
        return ProbeVerdict(result, Label.CANNOT_TELL, None, f"cannot tell: {UNEXPLAINED}")
    if result is SequentialResult.UNDECIDED:
        return ProbeVerdict(result, Label.CANNOT_TELL, None, f"cannot tell, {more}")
    if seen.suspect is not None:
        return ProbeVerdict(result, Label.QUANTISED, seen.suspect, f"quantised: {seen.suspect}")
    size = "" if seen.ratio is None else f": errors {seen.ratio:.1f} times our rounding"
    far = (
        (seen.ratio or 0.0) >= OTHER_RATIO
        or (seen.surprise or 0.0) >= OTHER_SURPRISE
        or seen.beyond >= OTHER_SHARE
    )
    which = "another model" if far else "another model, or weights changed in no known way"
    return ProbeVerdict(result, Label.OTHER_MODEL, None, f"{which}{size}")


def prompts_more(
    findings: Sequence[Finding], clearing: Collection[str], chances: Chances, judged_prompts: int
) -> float | None:
    """About how many more prompts lead to a verdict; None if nothing shows it yet.

    All tests that can clear must do so, and one is enough to convict.
    """
    to_clear, to_convict = 0.0, math.inf
    for each in findings:
        if each.test in clearing and each.result is not SequentialResult.HONEST:
            to_clear = max(to_clear, _missing(each, chances))
        log_evidence = float(each.figures.get("log_evidence", 0.0))
        if log_evidence > _LIKELY:
            to_convict = min(to_convict, (chances.convicts_at + _LIKELY) / log_evidence - 1.0)
    missing = judged_prompts * (to_clear if to_convict == math.inf else to_convict)
    return max(1.0, missing) if 0.0 < missing < _MOST else None


def _missing(finding: Finding, chances: Chances) -> float:
    """How many times as many nonces as so far the test needs to clear."""
    if "missing" in finding.figures:
        return float(finding.figures["missing"])
    log_clearing = float(finding.figures.get("log_clearing", 0.0))
    return chances.clears_at / log_clearing - 1.0 if log_clearing > 0.0 else math.inf
