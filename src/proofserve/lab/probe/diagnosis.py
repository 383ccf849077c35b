"""What is wrong with an endpoint that a test convicts: rounded weights, or another model.

This names; it does not convict, so it may look at all suspects and take the likeliest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from proofserve.lab.probe.block_judges import BlockJudges
from proofserve.lab.probe.readings import ReadAnswer, Readings
from proofserve.lab.verify.judges import Finding
from proofserve.protocol.verdict.sequential import SequentialResult

# A suspect whose mean cosine with the errors is as large explains them, whatever their size. What
# convicts by a cosine is named at a smaller one: rounding may be as large as what it adds to.
EXPLAINING_COSINE: Final = 0.5
# Tokens that are so much less likely than drawn ones (nats each) are another model's.
OTHER_SURPRISE: Final = 0.5
# A suspect explains greedy tokens if its own gaps are together at most this share of ours.
EXPLAINED_GAPS: Final = 0.3
# Blocks whose cosines are looked at.
_BLOCKS: Final = 16


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``suspect`` explains what was seen; None if none does. None is also what was not measured.

    ``ratio`` is the median of the errors over our own rounding, ``cosines`` are those of the blocks
    with the suspect. ``surprise`` is that of ReadAnswer over all sampled tokens, ``beyond`` the
    share of greedy tokens that are no honest ones.
    """

    suspect: str | None
    ratio: float | None
    cosines: tuple[float, ...]
    surprise: float | None
    beyond: float


def by_blocks(sizes: BlockJudges, findings: Sequence[Finding]) -> tuple[str | None, list[float]]:
    """The suspect that explains the errors of the blocks, and its cosines. Raises EngineFault."""
    convicted = [
        str(each.figures["suspect"])
        for each in findings
        if each.result is SequentialResult.FRAUD and "suspect" in each.figures
    ]
    if not sizes.errors:
        return None, []
    if convicted:
        return convicted[0], sizes.cosines(convicted[0], len(sizes.errors))
    means = {name: float(np.mean(sizes.cosines(name, _BLOCKS))) for name in sizes.names}
    best = max(means, key=means.__getitem__)
    if means[best] < EXPLAINING_COSINE:
        return None, []
    return best, sizes.cosines(best, len(sizes.errors))


def by_tokens(readings: Readings, answers: Sequence[ReadAnswer]) -> str | None:
    """The suspect that explains the tokens alone. Raises EngineFault."""
    scores = {name: _score(readings, name, answers) for name in readings.names}
    known = {name: score for name, score in scores.items() if score is not None}
    return max(known, key=known.__getitem__) if known else None


def _score(readings: Readings, name: str, answers: Sequence[ReadAnswer]) -> float | None:
    """By how much the tokens are likelier with the suspect; None if it does not explain them."""
    greedy = [each for each in answers if each.answer.prompt.greedy]
    sampled = [each for each in answers if not each.answer.prompt.greedy]
    left = sum(float(each.gaps.sum()) for each in readings.by_suspect(name, greedy))
    gaps = sum(float(each.gaps.sum()) for each in greedy)
    pairs = zip(sampled, readings.by_suspect(name, sampled), strict=True)
    likelier = sum(float((by.log_p - each.log_p).sum()) for each, by in pairs)
    if gaps > 0.0 and left > EXPLAINED_GAPS * gaps:
        return None
    tokens = sum(len(each.log_p) for each in sampled)
    if surprise_of(answers) * tokens - likelier >= OTHER_SURPRISE * max(1, tokens):
        return None
    return likelier + gaps - left


def surprise_of(answers: Sequence[ReadAnswer]) -> float:
    """That of all sampled tokens; 0 without any."""
    sampled = [each for each in answers if not each.answer.prompt.greedy]
    tokens = sum(len(each.log_p) for each in sampled)
    return sum(each.surprise * len(each.log_p) for each in sampled) / max(1, tokens)
