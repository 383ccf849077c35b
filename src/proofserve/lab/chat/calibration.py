"""What honest chat answers look like to a validator, for the file that ``verify-chat`` reads."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from proofserve.lab.calibrate.calibration_file import (
    FORMAT,
    CalibrationFile,
    GreedyFields,
    fit_of,
    suspects_of,
)
from proofserve.lab.calibrate.checkpoint_figures import (
    DeployingValidator,
    HonestRun,
    checkpoint_figures,
)
from proofserve.lab.calibrate.noise import noise
from proofserve.lab.chat.answers import BLOCK_TOKENS, Answer, Blocks
from proofserve.lab.chat.token_judge import AT_ONCE, GreedyLimit, TokenReader
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.client.vectors import vectors_of
from proofserve.protocol.receipts.record import SCHEME
from proofserve.protocol.receipts.sampled import penalised
from proofserve.protocol.verdict.chosen_tokens import greedy_gap

# In which a validator recomputes, so that nearly all rounding is the server's.
VALIDATOR_DTYPE = "float32"
RATE = 0.01
# Blocks on which the bank of suspects is measured.
BANK_BLOCKS = 128
# The limit of a greedy gap: above the largest seen, and taken to be passed by as many tokens as
# none in n tokens still leaves likely.
GAP_ROOM, LEAST_GAP, PASSED = 1.5, 0.01, 5.0
LEAST_GREEDY_TOKENS = 500


class CalibratingValidator(DeployingValidator, TokenReader, Protocol):
    """A bank whose suspects can also be deployed, and a reader of tokens."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The model's ``name``, the ``shape`` of its checkpoint, and the ``servers`` that answered."""

    name: str
    shape: Mapping[str, int] | None
    servers: str


def chat_calibration(
    about: Calibrated, blocks: Blocks, validator: CalibratingValidator, progress: Progress
) -> CalibrationFile:
    """The calibration by answers of honest servers; all of them have to be in ``blocks``.

    Sizes are those of the noisiest server, because a node runs one kind of engine throughout;
    directions are of all. Raises LabError for too few blocks of it, and EngineFault if a forward
    fails.
    """
    progress.step(f"recomputing {len(blocks.answers)} answers")
    honest = vectors_of(blocks.claims().claims, blocks.width)
    truth = validator.truth(tuple(honest))
    run = HonestRun(honest, truth, other_kernels=True, groups=blocks.conversations())
    noisiest = max((_part(run, of) for of in blocks.by_server()), key=_typical)
    found = noise(noisiest.distances, RATE)
    if not found.distances.all():
        raise LabError("some sketches are those of the reference: the server is no other engine")
    ratios = checkpoint_figures(validator, noisiest, 0, progress).ratios
    spread_out = list(honest)[:: max(1, len(honest) // BANK_BLOCKS)]
    bank = checkpoint_figures(validator, _part(run, spread_out), BANK_BLOCKS, progress)
    limit = greedy_limit(blocks.answers, validator)
    return CalibrationFile(
        format=FORMAT,
        version=2,
        model=about.name,
        shape=dict(about.shape) if about.shape else None,
        scheme=SCHEME,
        stronger_rng=False,
        seq_len=BLOCK_TOKENS,
        k_dim=blocks.k_dim,
        dtype=VALIDATOR_DTYPE,
        engines=(f"reference:{VALIDATOR_DTYPE}", about.servers),
        quantiles=found.quantiles,
        dist_threshold=found.dist_threshold,
        p_mismatch=found.rate,
        p_mismatch_interval=found.rate_interval,
        distances=found.distances.tolist(),
        fit=fit_of(np.exp(noisiest.widened(np.log(found.distances), noisiest.truth))),
        paired=None if ratios is None else fit_of(ratios),
        suspects=suspects_of(bank.suspects),
        greedy=GreedyFields(gap=limit.gap, rate=limit.rate) if limit else None,
    )


def _part(run: HonestRun, blocks: Collection[int]) -> HonestRun:
    vectors, truth = ({n: of[n] for n in blocks} for of in (run.vectors, run.truth))
    return replace(run, vectors=vectors, truth=truth)


def _typical(run: HonestRun) -> float:
    return float(np.median(run.distances))


def greedy_limit(answers: Sequence[Answer], reader: TokenReader) -> GreedyLimit | None:
    """From the greedy answers of honest servers; None if they have too few tokens."""
    greedy = [a for a in answers if a.sampling.temperature == 0.0 and not a.sampling.restricted]
    gaps = [gap for answer in greedy for gap in _gaps(answer, reader)]
    if len(gaps) < LEAST_GREEDY_TOKENS:
        return None
    return GreedyLimit(max(GAP_ROOM * max(gaps), LEAST_GAP), PASSED / len(gaps))


def _gaps(answer: Answer, reader: TokenReader) -> list[float]:
    states, found = reader.states(answer), []
    for first in range(0, len(answer.output), AT_ONCE):
        logits = reader.logits(states[first : first + AT_ONCE]).astype(np.float64)
        made = penalised(logits, answer.sampling, answer.prompt, answer.output, first)
        tokens = np.array(answer.output[first : first + len(made)])
        found += greedy_gap(made, tokens).tolist()
    return found


def calibration_lines(made: CalibrationFile, chats: int) -> Iterator[str]:
    """What was measured, for a reader."""
    distances = np.array(made.distances)
    yield f"{chats} chats, {len(distances)} blocks of {made.seq_len} tokens"
    yield f"errors of a block: {np.median(distances):.4f} (median), {distances.max():.4f} (largest)"
    widest = max(each.honest_sd for each in made.suspects.values())
    yield f"cosines with suspects: a standard deviation of at most {widest:.3f}"
    if made.greedy is None:
        yield f"greedy answers: fewer than {LEAST_GREEDY_TOKENS} tokens, so they are not tested"
    else:
        yield f"greedy answers: {made.greedy.gap:.3f} below the largest logit at most"
