"""Bodies of callbacks as nodes send them."""

from typing import Any

import numpy as np

from proofserve.protocol.codec import encode


def vector(nonce: int, k_dim: int = 4) -> str:
    return encode(np.full((1, k_dim), nonce / 1000, dtype=np.float32))[0]


def generated(*nonces: int, **changes: Any) -> dict[str, Any]:
    return {
        "public_key": "k3y",
        "block_hash": "b10c",
        "block_height": 77,
        "node_id": 3,
        "artifacts": [{"nonce": nonce, "vector_b64": vector(nonce)} for nonce in nonces],
        "encoding": {"dtype": "f16", "k_dim": 4, "endian": "le"},
    } | changes


def won(*nonces: int, **changes: Any) -> dict[str, Any]:
    return {
        "public_key": "k3y",
        "block_hash": "b10c",
        "block_height": 77,
        "node_id": 3,
        "nonces": list(nonces),
        "dist": [distance(nonce) for nonce in nonces],
        "r_target": 1.4,
    } | changes


def distance(nonce: int) -> float:
    """A float32, widened, as a node sends it."""
    return float(np.float32(1.4 - 1 / (nonce + 3)))


def judged(**changes: Any) -> dict[str, Any]:
    return {
        "nonces": [3, 7, 11],
        "computed_distances": [1.25, 1.5, 1.3],
        # A claim may be any number; null is one that JSON lacks.
        "received_distances": [1.25, -7.5, None],
        "valid": [True, False, False],
        "fraud_detected": True,
        "n_invalid": 2,
        "probability_honest": 7.5e-7,
        "public_key": "k3y",
        "block_hash": "b10c",
        "block_height": 77,
    } | changes


def validated(**changes: Any) -> dict[str, Any]:
    return {
        "request_id": "job",
        "public_key": "k3y",
        "block_hash": "b10c",
        "block_height": 77,
        "node_id": 3,
        "n_total": 4,
        "n_mismatch": 1,
        "mismatch_nonces": [7],
        "p_value": 0.004,
        "fraud_detected": True,
    } | changes
