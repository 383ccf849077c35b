import pytest

from proofserve.outbox.planning import CallbackPolicy


def test_pauses_double_up_to_the_longest() -> None:
    policy = CallbackPolicy()
    assert [policy.pause_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]
    assert policy.pause_s(10**9) == 30


def test_expiry_counts_failures_and_zero_is_never() -> None:
    assert [CallbackPolicy(max_retries=2).expires(n) for n in (1, 2, 3)] == [False, True, True]
    assert not CallbackPolicy(max_retries=0).expires(10**9)


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": -1.0},
        {"max_retries": -1},
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"backoff_first_s": 0.0},
        {"backoff_longest_s": -1.0},
        {"look_again_s": 0.0},
        {"max_artifacts": 0},
        {"max_concurrent": 0},
    ],
)
def test_numbers_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CallbackPolicy(**wrong)
