from collections.abc import Sequence

import numpy as np
import pytest

from lab.toy_deployment import ToyDeployment
from proofserve.lab.audit.attacks import Attack, attacks


def table(layers: int = 12, seq_len: int = 256) -> dict[str, Attack]:
    return {each.name: each for each in attacks(ToyDeployment(layers, seq_len))}


def test_every_attack_is_in_the_table() -> None:
    assert list(table()) == [
        *("weights of 8 bits", "weights of 6 bits", "weights of 4 bits", "weights in fp8"),
        *("first layer skipped", "middle layer skipped", "last layer skipped"),
        *("every fourth layer skipped", "model skipped"),
        *("last token only", "last 4 tokens only", "last 16 tokens only"),
        *("last 64 tokens only", "last 128 tokens only"),
        *("another checkpoint", "another nonce's vectors"),
        *("another key's vectors", "another block's vectors"),
        *("random unit vectors", "one vector for all", "zero vectors"),
    ]


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
    for attack in attacks(deployment):
        attack.prepare()
    assert [each for each in deployment.asked if isinstance(each, list)] == asked[
        : layers_of(asked)
    ]
    assert [each for each in deployment.asked if isinstance(each, int)] == asked[layers_of(asked) :]
    assert [each for each in deployment.asked if isinstance(each, str)] == [
        *("8 bits", "6 bits", "4 bits", "fp8 bits"),
        *("other checkpoint", "honest", "other key", "other block"),
    ]


def layers_of(asked: Sequence[object]) -> int:
    return sum(isinstance(each, list) for each in asked)


def test_savings_rank_as_one_expects() -> None:
    savings = {name: attack.saving for name, attack in table().items()}
    assert savings["model skipped"] == savings["zero vectors"] == 1.0
    assert savings["another checkpoint"] == 0.0
    assert (
        0
        < savings["last layer skipped"]
        < savings["every fourth layer skipped"]
        < savings["weights of 8 bits"]
        < savings["weights of 4 bits"]
        < savings["last 16 tokens only"]
        < savings["last token only"]
        < 1
    )


def test_another_nonces_vectors_are_those_of_the_next() -> None:
    deployment = ToyDeployment()
    honest = deployment.honest()(range(10))
    made = table()["another nonce's vectors"].prepare()([3, 8])
    assert np.array_equal(made[3], honest[4])
    assert np.array_equal(made[8], honest[9])


def test_forgeries_have_the_length_they_say() -> None:
    made = {name: table()[name].prepare()(range(50)) for name in list(table())[-3:]}
    random, constant, zero = made.values()
    for nonce in range(50):
        assert np.linalg.norm(random[nonce]) == pytest.approx(1.0)
        assert np.linalg.norm(constant[nonce]) == pytest.approx(1.0)
        assert not zero[nonce].any()
        assert np.array_equal(constant[nonce], constant[0])
    assert len({vector.tobytes() for vector in random.values()}) == 50
    assert np.linalg.norm(np.mean(list(random.values()), axis=0)) < 0.4
