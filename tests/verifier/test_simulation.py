"""Simulated verifications end as those of ``verify`` itself, nonce by nonce."""

from collections.abc import Sequence

import numpy as np
import pytest

from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.directions import Compared
from proofserve.protocol.verdict.evidence import log_path
from proofserve.reports import Progress
from proofserve.verifier.error_judges import DirectionJudge, FootprintJudge, PairedJudge
from proofserve.verifier.judges import Chances, Judge, Vectors
from proofserve.verifier.populations import OwnRun, uncalibrated
from proofserve.verifier.simulation import (
    Draws,
    Endings,
    NodeFigures,
    draws,
    first_of,
    first_passages,
    node_figures,
    simulated,
)
from proofserve.verifier.verification import Verification, decide
from verifier.toy_null import (
    REFERENCE,
    SERVER,
    WIDTH,
    Kernel,
    ToyBank,
    claims,
    figures,
    measurement,
    toy_null,
)

KERNELS = {"one": SERVER, "another": Kernel(size=1.2, kept=0.45)}
NONCES, MOST = 40, 120
CHANCES = Chances(1e-6, 1e-3, 0.3)
# A bank of weights that move results as little as rounding does, so that ``verify`` compares every
# nonce with all of it, as a simulation does.
BANK = ToyBank(KERNELS, ("near", "as near"))
KNOWN = {True: toy_null(BANK, KERNELS), False: uncalibrated(REFERENCE, WIDTH)}
NODES = {
    "honest": (SERVER, None),
    "another kernel": (Kernel(size=1.2, kept=0.45), None),
    "strange": (Kernel(size=1.6, kept=0.0), None),
    "very large": (Kernel(size=6.0), None),
    "near": (SERVER, "near"),
}
HOW = {
    SequentialResult.FRAUD: "convicted",
    SequentialResult.HONEST: "cleared",
    SequentialResult.UNEXPLAINED: "unexplained",
    SequentialResult.UNDECIDED: "undecided",
}


def verified(errors: Sequence[ClaimError], calibrated: bool) -> Verification:
    chances = Chances(CHANCES.alpha / 2, CHANCES.beta, CHANCES.share) if calibrated else CHANCES
    own = OwnRun(BANK, lambda _reference: KNOWN[calibrated], (REFERENCE,))
    judges: list[Judge] = [DirectionJudge(BANK, own, chances), FootprintJudge(own, chances)]
    if calibrated:
        judges.append(PairedJudge(own, chances))
    # A nonce that is drawn again has the same error.
    of = {error.nonce: error for error in errors}
    nonces = [error.nonce for error in errors]
    return decide(nonces, lambda chunk: [of[nonce] for nonce in chunk], 8, judges, Progress())


def shown(made: Vectors, calibrated: bool) -> NodeFigures:
    measured = measurement(BANK, range(NONCES))
    ours = {name: figures(BANK, errors) for name, errors in measured.references.items()}
    return node_figures(figures(BANK, made), ours, KNOWN[calibrated], measured.lengths)


def ended_as(ended: Endings, run: int) -> tuple[str, int]:
    convicted, cleared = int(ended.convicted_at[run]), int(ended.cleared_at[run])
    if convicted <= min(cleared, ended.most):
        return "convicted", convicted
    if cleared <= ended.most:
        return "cleared", cleared
    return ("unexplained" if ended.refuted[run] else "undecided"), ended.most


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize("name", NODES)
def test_a_simulation_ends_as_verify_does(name: str, calibrated: bool) -> None:
    kernel, served = NODES[name]
    made = BANK.errors_by(kernel, range(NONCES), 300, served)
    drawn = draws(NONCES, 12, MOST, seed=3)
    ended = simulated(shown(made, calibrated), KNOWN[calibrated], CHANCES, drawn)
    by_nonce = claims(made)
    for run, rows in enumerate(drawn.rows.tolist()):
        real = verified([by_nonce[row] for row in rows], calibrated)
        how, nonces = ended_as(ended, run)
        assert HOW[real.verdict] == how
        # ``verify`` rules a suspect out by lengths where it computes no prediction. Where errors
        # are longer than all that is known, lengths say less than directions.
        assert abs(real.nonces_used - nonces) <= (3 if name != "very large" else MOST)
    counts = (ended.convicted, ended.cleared, ended.unexplained, ended.undecided)
    assert sum(counts) == 12
    expected = {"honest": (0, 12, 0, 0), "near": (12, 0, 0, 0), "strange": (0, 0, 12, 0)}
    if name in expected:
        assert counts == expected[name]


def test_the_kernel_whose_footprint_a_node_has_is_named() -> None:
    for name, kernel in KERNELS.items():
        node = shown(BANK.errors_by(kernel, range(NONCES), 300), True)
        found = simulated(node, KNOWN[True], CHANCES, draws(NONCES, 10, 20)).closest
        assert found in {name, REFERENCE}


def test_a_first_passage_is_that_of_the_evidence_itself() -> None:
    random = np.random.default_rng(3)
    factors = random.normal(0.05, 0.6, size=(20, 3))
    drawn = Draws(random.integers(0, 20, (50, 100)), np.full(20, 1 / 20))
    stops = first_passages(factors, drawn, 4.0)
    for run, rows in enumerate(drawn.rows):
        reached = log_path(factors[rows]) >= 4.0
        assert stops[run] == (reached.argmax() if reached.any() else drawn.never)
    assert 1 < np.median(stops) < drawn.never
    # A run need not be followed beyond ``until``, and is not wrong before it.
    until = np.full(50, 40)
    early = first_passages(factors, drawn, 4.0, until)
    assert np.array_equal(early, np.where(stops <= 40, stops, drawn.never))
    others = random.normal(0.05, 0.6, size=(20, 3))
    either = np.minimum(stops, first_passages(others, drawn, 4.0))
    assert np.array_equal(first_of([factors, others], drawn, 4.0), either)


def test_what_hardly_ever_happens_is_not_simulated() -> None:
    random = np.random.default_rng(4)
    factors = random.normal(-0.5, 0.5, size=(100, 4))
    drawn = draws(100, 10_000, 1000)
    assert (first_passages(factors, drawn, 20.0) == drawn.never).all()


def test_a_node_without_vectors_is_convicted_by_its_size_alone() -> None:
    honest = shown(BANK.errors_by(SERVER, range(NONCES), 300), True)
    silent = NodeFigures(
        np.full(NONCES, np.inf),
        np.zeros(NONCES),
        {
            name: Compared(np.full(NONCES, np.nan), of.predicted, np.full(NONCES, np.nan))
            for name, of in honest.suspects.items()
        },
        np.zeros(NONCES),
    )
    ended = simulated(silent, KNOWN[True], CHANCES, draws(NONCES, 50, MOST))
    assert (ended.convicted, ended.cleared) == (50, 0)
    assert (ended.by_test["direction"] > MOST).all()
    missing = [ClaimError(n, None, Mismatch(n, Reason.MISSING)) for n in range(MOST)]
    real = verified(missing, calibrated=True)
    assert real.nonces_used == int(ended.convicted_at[0])
