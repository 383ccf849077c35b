"""A node is honest if it has the footprint of a known kernel, and a fraud only by evidence."""

from dataclasses import replace

import numpy as np
import pytest

from proofserve.protocol.verdict.comparison import ClaimError, Mismatch, Reason
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress
from proofserve.verifier.error_judges import DirectionJudge, FootprintJudge, PairedJudge
from proofserve.verifier.judges import Chances, Judge
from proofserve.verifier.populations import HonestRuns, populations
from proofserve.verifier.verification import Verification, decide
from verifier.toy_null import REFERENCE, SERVER, Kernel, ToyBank, claims, gathered, own_run

CHANCES = Chances(5e-7, 1e-3, 0.3)
KERNELS = {
    "one": SERVER,
    "a larger one": Kernel(size=1.3, kept=0.58),
    "another reference's": Kernel(kept=0.7, like="second reference"),
}
SAMPLE = 200


@pytest.fixture(scope="module")
def bank() -> ToyBank:
    return ToyBank(KERNELS)


@pytest.fixture(scope="module")
def known(bank: ToyBank) -> HonestRuns:
    return gathered(bank, KERNELS)


def verdict(
    bank: ToyBank, known: HonestRuns | None, errors: list[ClaimError], chances: Chances = CHANCES
) -> Verification:
    own = own_run(bank, known)
    judges: list[Judge] = [DirectionJudge(bank, own, chances), FootprintJudge(own, chances)]
    if known is not None:
        judges.append(PairedJudge(own, chances))
    by_nonce = {error.nonce: error for error in errors}
    return decide(
        list(by_nonce), lambda nonces: [by_nonce[n] for n in nonces], 8, judges, Progress()
    )


def of_node(
    bank: ToyBank, node: Kernel, served: str | None = None, seed: int = 300
) -> list[ClaimError]:
    return claims(bank.errors_by(node, range(SAMPLE), seed, served))


def kernel_of(found: Verification) -> object:
    (name,) = (each.figures["kernel"] for each in found.opinions if each.test == "footprint")
    return name


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("seed", range(300, 303))
def test_a_server_is_cleared_beside_the_reference_most_like_it(
    bank: ToyBank, known: HonestRuns, calibrated: bool, name: str, seed: int
) -> None:
    found = verdict(bank, known if calibrated else None, of_node(bank, KERNELS[name], seed=seed))
    assert found.verdict is SequentialResult.HONEST
    # What keeps 0.58 of the 0.6 that an emulation expects takes longer.
    is_near_the_limit = name == "a larger one" and not calibrated
    assert 20 <= found.nonces_used <= (100 if is_near_the_limit else 60)


def test_the_kernel_whose_footprint_the_node_has_is_named(bank: ToyBank, known: HonestRuns) -> None:
    found = verdict(bank, known, of_node(bank, KERNELS["another reference's"]))
    assert kernel_of(found) in {"another reference's", "second reference"}


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize("served", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_suspected_weights_are_a_fraud_on_any_kernel(
    bank: ToyBank, known: HonestRuns, calibrated: bool, served: str, kernel: str
) -> None:
    errors = of_node(bank, KERNELS[kernel], served)
    found = verdict(bank, known if calibrated else None, errors)
    assert found.verdict is SequentialResult.FRAUD
    direction = next(each for each in found.opinions if each.test == "direction")
    assert direction.figures["suspect"] == served
    assert found.nonces_used <= 24


@pytest.mark.parametrize("calibrated", [True, False], ids=["calibrated", "uncalibrated"])
@pytest.mark.parametrize(
    "node",
    [
        Kernel(size=1.8, kept=0.0),
        Kernel(size=0.9, kept=0.05),
        Kernel(size=0.2, kept=0.0),
        Kernel(size=1.0, kept=0.2),
    ],
    ids=["larger", "private weights and noise", "float16", "little left"],
)
def test_what_has_no_known_footprint_is_neither_convicted_nor_cleared(
    bank: ToyBank, known: HonestRuns, calibrated: bool, node: Kernel
) -> None:
    """A kernel that was not measured, or a lie whose errors are as long as honest ones."""
    for seed in range(300, 305):
        found = verdict(bank, known if calibrated else None, of_node(bank, node, seed=seed))
        assert found.verdict is SequentialResult.UNEXPLAINED
        assert found.nonces_used == SAMPLE
        assert SequentialResult.FRAUD not in {each.result for each in found.opinions}


def test_half_of_the_nonces_without_a_footprint_are_noticed(
    bank: ToyBank, known: HonestRuns
) -> None:
    honest, lie = of_node(bank, SERVER), of_node(bank, Kernel(size=0.9, kept=0.05), seed=7)
    half = [one if one.nonce % 2 else other for one, other in zip(honest, lie, strict=True)]
    for runs in (known, None):
        assert verdict(bank, runs, half).verdict is SequentialResult.UNEXPLAINED


def test_invented_vectors_are_a_fraud_in_all_nonces_and_in_a_tenth(
    bank: ToyBank, known: HonestRuns
) -> None:
    honest = of_node(bank, KERNELS["one"])
    drawn = np.random.default_rng(0)

    def invented(error: ClaimError) -> ClaimError:
        return ClaimError(error.nonce, drawn.normal(0.0, 0.1, len(error.error)).astype(np.float32))

    everywhere = verdict(bank, known, [invented(each) for each in honest])
    assert everywhere.verdict is SequentialResult.FRAUD
    assert everywhere.nonces_used <= 20
    mixed = [invented(each) if each.nonce % 10 == 5 else each for each in honest]
    careful = replace(CHANCES, share=0.1)
    assert verdict(bank, known, mixed, careful).verdict is SequentialResult.FRAUD
    assert verdict(bank, known, honest, careful).verdict is SequentialResult.HONEST


def test_claims_without_a_vector_convict_beside_a_calibration_and_clear_nobody(
    bank: ToyBank, known: HonestRuns
) -> None:
    broken = [ClaimError(n, None, Mismatch(n, Reason.MISSING)) for n in range(40)]
    assert verdict(bank, known, broken).verdict is SequentialResult.FRAUD
    assert verdict(bank, None, broken).verdict is SequentialResult.UNEXPLAINED


def test_the_verdict_says_which_share_of_forged_nonces_it_excludes(
    bank: ToyBank, known: HonestRuns
) -> None:
    for share in (0.5, 0.1):
        found = verdict(bank, known, of_node(bank, SERVER), replace(CHANCES, share=share))
        (opinion,) = (each for each in found.opinions if each.test == "footprint")
        assert opinion.figures["excluded_share"] == share


def test_a_measured_kernel_that_errs_so_far_that_lies_would_hide_clears_nobody(
    bank: ToyBank,
) -> None:
    near, far = Kernel(size=1.4, kept=0.5), Kernel(size=1.6, kept=0.5)
    cleared_by = populations(gathered(bank, {"near": near, "far": far}), REFERENCE)
    assert {*cleared_by.footprints} == {REFERENCE, "near"}
    assert {"near", "far"} < {*cleared_by.names}
