"""Simulated verifications end as those of ``verify`` itself, nonce by nonce."""

from collections.abc import Sequence

import numpy as np
import pytest

from proofserve.lab.report import Progress
from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.evidence import Evidence
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.direction import CalibratedYardstick, DirectionJudge, EmulatedYardstick
from proofserve.verifier.judges import BankRun, Chances, Judge, PairedJudge, TwinJudge
from proofserve.verifier.simulation import (
    Draws,
    Endings,
    draws,
    first_of,
    first_passages,
    node_figures,
    simulated,
)
from proofserve.verifier.verification import Verification, decide
from soundness.uncalibrated import simulated_uncalibrated
from verifier.toy_null import Kernel, ToyBank, claims, figures, toy_null

KERNELS = {"one": Kernel(), "head norms": Kernel(size=1.2, alike=0.45)}
NONCES, MOST = 40, 80
CHANCES = Chances(1e-6, 1e-3)
# A bank so small that ``verify`` compares every nonce with all of it, as a simulation does.
BANK = ToyBank(KERNELS, ("int8", "fp8"))
NULL = toy_null(BANK, KERNELS)
NODES = {
    "honest": (Kernel(), None),
    "another kernel": (Kernel(size=1.2, alike=0.45), None),
    "strange": (Kernel(size=1.8, alike=0.85), None),
    "rather large": (Kernel(size=3.0), None),
    "leaning": (Kernel(lean=0.25), None),
    "int8": (Kernel(), "int8"),
}
HOW = {
    SequentialResult.FRAUD: "convicted",
    SequentialResult.HONEST: "cleared",
    SequentialResult.UNEXPLAINED: "unexplained",
    SequentialResult.UNDECIDED: "undecided",
}


def verified(errors: Sequence[ClaimError], calibrated: bool) -> Verification:
    half = Chances(CHANCES.alpha / 2, CHANCES.beta)
    judges: list[Judge] = [
        PairedJudge(BANK.own_errors, NULL, half),
        DirectionJudge(BANK, CalibratedYardstick(NULL), half),
        TwinJudge(BANK.own_errors, NULL, half),
    ]
    if not calibrated:
        judges = [DirectionJudge(BANK, EmulatedYardstick(BANK.kernels), CHANCES)]
    # A nonce that is drawn again has the same error.
    of = {error.nonce: error for error in errors}
    nonces = [error.nonce for error in errors]
    return decide(nonces, lambda chunk: [of[nonce] for nonce in chunk], 8, judges, Progress())


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
    shown, own = figures(BANK, made), figures(BANK, BANK.own_errors(range(NONCES)))
    drawn = draws(NONCES, 12, MOST, seed=3)
    if calibrated:
        ended = simulated(node_figures(shown, own, NULL), NULL, CHANCES, drawn)
    else:
        of_kernels = [
            figures(BANK, BANK.errors(BankRun(kernels=k), range(NONCES))) for k in KERNELS
        ]
        ended = simulated_uncalibrated(shown, own, of_kernels, CHANCES, drawn)
    by_nonce = claims(made)
    for run, rows in enumerate(drawn.rows.tolist()):
        real = verified([by_nonce[row] for row in rows], calibrated)
        assert (HOW[real.verdict], real.nonces_used) == ended_as(ended, run)
    counts = (ended.convicted, ended.cleared, ended.unexplained, ended.undecided)
    assert sum(counts) == 12
    expected = {"honest": (0, 12, 0, 0), "int8": (12, 0, 0, 0), "another kernel": (0, 12, 0, 0)}
    if calibrated and name in expected:
        assert counts == expected[name]


def test_the_closest_kernel_is_named() -> None:
    own = figures(BANK, BANK.own_errors(range(NONCES)))
    for name, kernel in KERNELS.items():
        shown = figures(BANK, BANK.errors_by(kernel, range(NONCES), 300))
        node = node_figures(shown, own, NULL)
        assert simulated(node, NULL, CHANCES, draws(NONCES, 10, 20)).closest == name


def test_a_first_passage_is_that_of_the_evidence_itself() -> None:
    random = np.random.default_rng(3)
    factors = random.normal(0.05, 0.6, size=(20, 3))
    drawn = Draws(random.integers(0, 20, (50, 100)), np.full(20, 1 / 20))
    stops = first_passages(factors, drawn, 4.0)
    for run, rows in enumerate(drawn.rows):
        evidence, expected = Evidence(3), drawn.never
        for n, row in enumerate(rows, 1):
            evidence.add(factors[row])
            if evidence.log >= 4.0:
                expected = n
                break
        assert stops[run] == expected
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
    own = figures(BANK, BANK.own_errors(range(NONCES)))
    none = np.full(NONCES, np.nan)
    silent = type(own)(
        np.full(NONCES, np.inf), none, dict.fromkeys(own.cosines, none), np.arange(NONCES)
    )
    ended = simulated(node_figures(silent, own, NULL), NULL, CHANCES, draws(NONCES, 50, MOST))
    assert (ended.convicted, ended.cleared) == (50, 0)
    assert (ended.by_test["direction"] > MOST).all()
    missing = [ClaimError(n, None, Mismatch(n, Reason.MISSING)) for n in range(MOST)]
    real = verified(missing, calibrated=True)
    assert real.nonces_used == int(ended.convicted_at[0])
