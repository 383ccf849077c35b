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
