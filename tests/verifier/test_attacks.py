from collections.abc import Sequence

import numpy as np
import pytest

from proofserve.verifier.audit.attacks import attacks
from proofserve.verifier.audit.deployment import AuditedProver
from verifier.toy_deployment import PRIVATE, SUSPECTS, ToyDeployment

NOISE = 0.01


def table(deployment: ToyDeployment | None = None) -> dict[str, AuditedProver]:
    deployment = deployment or ToyDeployment()
    return {each.name: each for each in attacks(deployment, NOISE)}


def test_every_attack_is_in_the_table() -> None:
    assert list(table()) == [
        "int8 per channel",
        "int8 per channel, noise of 1 honest distances",
        "int8 per channel, noise of 2 honest distances",
        *("int4 g128", PRIVATE),
        *("first layer skipped", "middle layer skipped", "last layer skipped"),
        *("every fourth layer skipped", "model skipped"),
        *("first token only", "first 4 tokens only", "first 16 tokens only"),
        *("first 64 tokens only", "first 128 tokens only"),
        *("another checkpoint", "another nonce's vectors"),
        *("another key's vectors", "another block's vectors"),
        *("random unit vectors", "one vector for all", "zero vectors"),
        "first layer's projections kept per token",
    ]


def test_a_scheme_of_the_last_position_is_attacked_from_there() -> None:
    names = list(table(ToyDeployment(every_position=False)))
    assert "last 4 tokens only" in names
    assert "first 4 tokens only" not in names
    assert "first layer's projections kept per token" not in names


@pytest.mark.parametrize(
    ("layers", "seq_len", "asked"),
    [
        (12, 256, [[0], [6], [11], [1, 5, 9], list(range(12)), 1, 4, 16, 64, 128]),
        (4, 32, [[0], [2], [3], [1], [0, 1, 2, 3], 1, 4, 8, 16]),
        (2, 4, [[0], [1], [1], [0, 1], 1, 2]),
    ],
)
def test_what_is_left_out_suits_the_model(layers: int, seq_len: int, asked: list[object]) -> None:
    deployment = ToyDeployment(layers, seq_len)
    for attack in attacks(deployment, NOISE):
        attack.prepare()
    assert of_kind(list, deployment.asked) + of_kind(int, deployment.asked) == asked
    # The weights behind noise are made again.
    first = [name for name in SUSPECTS if "int8" in name]
    assert of_kind(str, deployment.asked) == [
        *(first * 3),
        *("int4 g128", PRIVATE, "other checkpoint", "other key", "other block"),
    ]


def of_kind(kind: type, asked: Sequence[object]) -> list[object]:
    return [each for each in asked if isinstance(each, kind)]


def test_savings_rank_as_one_expects() -> None:
    savings = {name: attack.saving for name, attack in table().items()}
    assert savings["model skipped"] == savings["zero vectors"] == 1.0
    assert savings["another checkpoint"] == 0.0
    assert (
        0
        < savings["first layer's projections kept per token"]
        < savings["last layer skipped"]
        < savings["every fourth layer skipped"]
        < savings["int8 per channel"]
        < savings["int4 g128"]
        < savings["first 16 tokens only"]
        < savings["first token only"]
        < 1
    )


def test_a_shortcut_that_is_exact_has_the_honest_vectors() -> None:
    deployment = ToyDeployment()
    (exact,) = (each for each in table(deployment).values() if each.exact)
    assert exact.name == "first layer's projections kept per token"
    made, honest = exact.prepare()(range(5)), deployment.deployed(range(5))
    assert all(np.array_equal(made[nonce], honest[nonce]) for nonce in range(5))


@pytest.mark.parametrize("times", [1, 2])
def test_noise_has_the_length_it_says_and_another_direction_each_time(times: int) -> None:
    found = table()
    plain = found["int8 per channel"].prepare()(range(50))
    noisy = found[f"int8 per channel, noise of {times} honest distances"].prepare()(range(50))
    added = [noisy[nonce] - plain[nonce] for nonce in range(50)]
    assert np.linalg.norm(added, axis=1) == pytest.approx(times * NOISE, rel=1e-3)
    assert np.linalg.norm(np.mean(added, axis=0)) < 0.3 * times * NOISE


def test_another_nonces_vectors_are_those_of_the_next() -> None:
    deployment = ToyDeployment()
    honest = deployment.deployed(range(10))
    made = table()["another nonce's vectors"].prepare()([3, 8])
    assert np.array_equal(made[3], honest[4])
    assert np.array_equal(made[8], honest[9])


def test_forgeries_have_the_length_they_say() -> None:
    names = ("random unit vectors", "one vector for all", "zero vectors")
    random, constant, zero = (table()[name].prepare()(range(50)) for name in names)
    for nonce in range(50):
        assert np.linalg.norm(random[nonce]) == pytest.approx(1.0)
        assert np.linalg.norm(constant[nonce]) == pytest.approx(1.0)
        assert not zero[nonce].any()
        assert np.array_equal(constant[nonce], constant[0])
    assert len({vector.tobytes() for vector in random.values()}) == 50
    assert np.linalg.norm(np.mean(list(random.values()), axis=0)) < 0.4
