import numpy as np
import pytest

from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import distances, tampered, vectors_of


@pytest.fixture
def claims() -> list[Claim]:
    rows = np.random.default_rng(1).normal(size=(16, 12))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return [Claim(n, text) for n, text in enumerate(encode(rows.astype(np.float32)))]


def test_a_forgery_differs_where_it_should_and_nowhere_else(claims: list[Claim]) -> None:
    forged = tampered(claims, 12, every=4)
    changed = [a.nonce for a, b in zip(claims, forged, strict=True) if a != b]
    assert changed == [0, 4, 8, 12]


def test_a_forged_vector_still_looks_like_one(claims: list[Claim]) -> None:
    for vector in vectors_of(tampered(claims, 12, every=1), 12).values():
        assert float(np.linalg.norm(vector)) == pytest.approx(1.0, abs=1e-3)


def test_distances_are_taken_nonce_by_nonce(claims: list[Claim]) -> None:
    assert distances(claims, list(reversed(claims)), 12) == [0.0] * 16
