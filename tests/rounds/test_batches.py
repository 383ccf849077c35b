import numpy as np
import pytest

from proofserve.rounds.batches import NOT_FINITE, artifacts_of, checked, failures_of
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch


def batch(nonces: tuple[int, ...], failed: tuple[int, ...] = (), width: int = 2) -> ProofBatch:
    return ProofBatch(nonces, np.zeros((len(nonces), width), dtype=np.float32), failed)


def test_a_complete_batch_passes() -> None:
    answer = batch((1, 3), failed=(2,))
    assert checked(answer, [1, 2, 3], 2) is answer
    assert [a.nonce for a in artifacts_of(answer)] == [1, 3]
    assert failures_of(answer) == {2: NOT_FINITE}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(batch((1, 2)), id="a nonce is missing"),
        pytest.param(batch((1, 3, 2)), id="another order"),
        pytest.param(batch((1, 2, 3, 4)), id="one too many"),
        pytest.param(batch((1, 2, 3), failed=(4,)), id="a failure nobody asked for"),
        pytest.param(batch((1, 2, 3), failed=(3,)), id="both there and failed"),
        pytest.param(batch((1, 2, 3), width=3), id="another width"),
        pytest.param(
            ProofBatch((1, 2, 3), np.full((3, 2), np.nan, dtype=np.float32)), id="not a number"
        ),
        pytest.param(
            ProofBatch((1, 2, 3), np.full((3, 2), 1e5, dtype=np.float32)), id="beyond float16"
        ),
    ],
)
def test_anything_else_is_a_fault(answer: ProofBatch) -> None:
    with pytest.raises(EngineFault):
        checked(answer, [1, 2, 3], 2)
