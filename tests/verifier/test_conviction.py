import numpy as np
import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.verdict.counting import (
    SequentialResult,
    SequentialTest,
    judge,
    judge_distances,
    power,
)
from proofserve.rounds.records import StatTest
from proofserve.verifier.audit.audit import ConvictionRule, conviction, least_rate

RULE = ConvictionRule()


def test_what_always_mismatches_needs_three() -> None:
    # 0.001 ** 2 is not below 1e-6, 0.001 ** 3 is.
    found = conviction(RULE, 1.0)
    assert found.fixed_nonces == 3
    assert found.sequential is not None
    assert (found.sequential.nonces, found.sequential.p_fraud) == (3, 0.5)
    assert found.default_sequential_convicts == 1.0


def test_what_never_mismatches_is_never_convicted() -> None:
    found = conviction(RULE, 0.0)
    assert (found.fixed_nonces, found.sequential, found.default_sequential_convicts) == (
        None,
        None,
        0.0,
    )
    assert conviction(RULE, 0.001).default_sequential_convicts <= 1e-6


@pytest.mark.parametrize("rate", [0.8, 0.3, 0.1, 0.05])
def test_the_fixed_test_convicts_as_often_as_it_says(rate: float) -> None:
    n = conviction(RULE, rate).fixed_nonces
    assert n is not None
    assert power(n, 0.001, 1e-6, rate) >= 0.999
    seen = np.random.default_rng(1).binomial(n, rate, 4000)
    convicted = np.mean([judge(int(m), n, 0.001, 1e-6).fraud_detected for m in seen])
    assert convicted > 0.995


@pytest.mark.parametrize("rate", [0.5, 0.10])
def test_the_sequential_test_convicts_as_often_as_it_says(rate: float) -> None:
    found = conviction(RULE, rate).sequential
    assert found is not None
    test = SequentialTest(0.001, found.p_fraud)
    random = np.random.default_rng(2)
    took = []
    for _ in range(1000):
        mismatches = np.cumsum(random.random(found.nonces) < rate)
        ends = (
            n
            for n, m in enumerate(mismatches, 1)
            if test.result(int(m), n) is SequentialResult.FRAUD
        )
        took.append(next(ends, None))
    ended = [n for n in took if n is not None]
    assert len(ended) >= 990
    assert np.mean(ended) == pytest.approx(found.expected, rel=0.1)


def test_a_patient_setting_catches_what_the_default_clears() -> None:
    found = conviction(RULE, 0.05)
    assert found.sequential is not None
    assert found.sequential.p_fraud == 0.05
    assert found.default_sequential_convicts < 0.1


def test_the_least_rate_is_just_enough() -> None:
    least = least_rate(RULE)
    assert least is not None
    sizes = range(1, 1001)
    assert max(power(n, 0.001, 1e-6, least) for n in sizes) >= 0.999
    assert max(power(n, 0.001, 1e-6, least - 1e-5) for n in sizes) < 0.999
    assert conviction(RULE, least).fixed_nonces is not None
    assert conviction(RULE, least - 1e-5).fixed_nonces is None


def test_so_few_nonces_that_nothing_convicts() -> None:
    rule = ConvictionRule(max_nonces=2)
    assert least_rate(rule) is None
    assert conviction(rule, 1.0).fixed_nonces is None


@pytest.mark.parametrize("field", ["p_mismatch", "alpha", "power"])
def test_a_chance_that_is_none_is_named(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        ConvictionRule(**{field: 1.0})


@pytest.mark.parametrize(
    ("protocol", "most", "p_value", "p_value_of_one_more"),
    [("artifact", 10, 0.009955, 0.010945), ("distance", 20, 0.009953, 0.010448)],
)
def test_one_bad_claim_convicts_a_small_batch_by_the_networks_statistics(
    protocol: str, most: int, p_value: float, p_value_of_one_more: float
) -> None:
    """The distance protocol fixes p_mismatch at 5e-4 (see docs/audit.md)."""
    network = StatTest()
    assert (network.p_mismatch, network.fraud_threshold) == (0.001, 0.01)
    verdicts = {
        n: judge(1, n, network.p_mismatch, network.fraud_threshold)
        if protocol == "artifact"
        else judge_distances(1, n, network.fraud_threshold)
        for n in range(1, most + 100)
    }
    assert {n for n, verdict in verdicts.items() if verdict.fraud_detected} == set(
        range(1, most + 1)
    )
    assert verdicts[most].p_value == pytest.approx(p_value, abs=1e-6)
    assert verdicts[most + 1].p_value == pytest.approx(p_value_of_one_more, abs=1e-6)
