"""What a validator computes, and how often: nothing twice, and together what is expected."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from proofserve.engines import CheckpointError
from proofserve.engines.reference.engine import Run
from proofserve.engines.reference.network import Network
from proofserve.protocol.identity import Block
from proofserve.protocol.sketch import SketchScheme
from proofserve.reports import ReportedError
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload
from proofserve.verifier.judges import OWN, PUBLISHED, BankRun, Variant, Vectors
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.models import SmallModels

WORK = Workload(SketchScheme(k_dim=16), Block("0xabc", 7), "node-key", 16)
SUSPECT, OTHER, KERNELS = "int8 g32", "int4 g128", "TF32"


class CountedProofs:
    """Computes as a validator does; ``calls`` has the nonces of each run of each call."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, ...]]] = []
        self.networks: list[list[Network]] = []
        self._compute = proofs_of(WORK, 4)

    def __call__(self, runs: Sequence[Run]) -> Sequence[ProofBatch]:
        self.calls.append([tuple(run.nonces) for run in runs])
        self.networks.append([run.network for run in runs])
        return self._compute(runs)


@pytest.fixture(scope="module")
def loaded(small_models: SmallModels) -> CheckpointValidator:
    return CheckpointValidator(ValidatorSetup(small_models.mixture()), proofs_of(WORK, 4))


@pytest.fixture
def proofs() -> CountedProofs:
    return CountedProofs()


@pytest.fixture
def validator(loaded: CheckpointValidator, proofs: CountedProofs) -> CheckpointValidator:
    return loaded.with_other(proofs)


def same(some: Vectors, others: Vectors) -> bool:
    return some.keys() == others.keys() and all(np.array_equal(some[n], others[n]) for n in some)


def test_what_is_expected_is_computed_in_one_call_and_nothing_twice(
    validator: CheckpointValidator, proofs: CountedProofs
) -> None:
    kernels = BankRun(kernels=KERNELS)
    validator.expect({OWN: range(4), kernels: range(4)})
    validator.expect({BankRun(SUSPECT): [0, 2], BankRun(OTHER): [1]})
    assert proofs.calls == []
    validator.truth(range(4))
    # The published weights come first, for all nonces: others hold the experts that they choose.
    assert proofs.calls[0][0] == (0, 1, 2, 3)
    assert Counter(proofs.calls[0]) == {(0, 1, 2, 3): 3, (0, 2): 1, (1,): 1}
    assert proofs.networks[0][0] == validator.published
    validator.errors(OWN, range(4))
    validator.errors(BankRun(kernels=KERNELS), range(4))
    validator.predictions(SUSPECT, [0, 2])
    validator.predictions(OTHER, [1])
    assert len(proofs.calls) == 1
    validator.predictions(OTHER, [1, 2, 7])
    # Of the published network the new nonce alone, of the suspect what is missing.
    assert proofs.calls[1:] == [[(7,), (2, 7)]]


def test_together_or_one_by_one_the_vectors_are_the_same(loaded: CheckpointValidator) -> None:
    """In forwards of the same nonces; others may round otherwise."""
    alone, together = (loaded.with_other(proofs_of(WORK, 4)) for _ in range(2))
    runs = (PUBLISHED, OWN, BankRun(kernels=KERNELS), BankRun(SUSPECT), replace(OWN, weights=OTHER))
    together.expect(dict.fromkeys(runs, range(6)))
    for one in (together, alone):
        one.truth(range(6))
    assert same(together.truth(range(6)), alone.truth(range(6)))
    assert same(together.predictions(SUSPECT, range(6)), alone.predictions(SUSPECT, range(6)))
    for run in (OWN, BankRun(kernels=KERNELS), replace(OWN, weights=OTHER)):
        assert same(together.errors(run, range(6)), alone.errors(run, range(6)))


def test_nonces_and_seconds_of_suspects_are_counted(validator: CheckpointValidator) -> None:
    before, spent = validator.forwards, validator.suspects_s
    validator.errors(OWN, range(3))
    assert (validator.forwards, validator.suspects_s) == (before, spent)
    validator.predictions(SUSPECT, range(3))
    assert validator.forwards == before + 3
    assert validator.suspects_s > spent


def test_a_vector_that_is_not_finite_names_its_run(small_models: SmallModels) -> None:
    setup = ValidatorSetup(small_models.broken())
    with pytest.raises(EngineFault, match="published: the vector of nonce 5 is not finite"):
        CheckpointValidator(setup, proofs_of(WORK, 4)).truth([5, 6])


@pytest.mark.parametrize("dtype", ["float32", "int3"])
def test_a_dtype_in_which_no_server_rounds_is_refused(
    small_models: SmallModels, dtype: str
) -> None:
    setup = ValidatorSetup(small_models.mixture(), served_dtype=dtype)
    with pytest.raises((ReportedError, CheckpointError), match=f"{dtype}.* bfloat16"):
        CheckpointValidator(setup, proofs_of(WORK, 4))


def test_a_server_that_compiles_has_other_operations_for_chat_than_for_proofs(tiny: Path) -> None:
    x86, card = "vLLM on x86 with bfloat16", "vLLM on a GPU"
    of_proofs = CheckpointValidator(ValidatorSetup(tiny)).variants
    of_chat = CheckpointValidator(ValidatorSetup(tiny), of_chat=True).variants
    assert of_proofs[x86][Variant("PyTorch")] == f"{x86}, ops of PyTorch"
    assert of_chat[x86][Variant("compiled", 2)] == f"{x86}, compiled on 2 ranks"
    assert {each.operations for each in of_proofs[x86]} == {"vLLM", "PyTorch"}
    assert {each.operations for each in of_chat[x86]} == {"vLLM", "compiled"}
    # The graphs of cards are not known, and transformers has no operations of vLLM.
    assert {each.operations for each in of_chat[card]} == {"vLLM"}
    assert set(of_proofs["our own rounding"]) == {Variant(ranks=ranks) for ranks in (2, 4, 8)}


def test_where_vllm_has_no_sums_over_ranks_those_of_gloo_are_tried_too(tiny: Path) -> None:
    cut_off = "vLLM on x86 without bfloat16"
    of_proofs = CheckpointValidator(ValidatorSetup(tiny)).variants
    assert of_proofs[cut_off][Variant(ranks=2)] == f"{cut_off} on 2 ranks"
    assert of_proofs[cut_off][Variant(ranks=2, by_gloo=True)] == f"{cut_off} on 2 ranks, by gloo"
    assert not any(each.by_gloo for each in of_proofs["vLLM on x86 with bfloat16"])
