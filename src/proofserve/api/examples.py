"""Bodies that the OpenAPI pages offer; each is accepted by a node that serves a model ``toy``."""

from pydantic import JsonValue

ARTIFACT_ORDER: dict[str, JsonValue] = {
    "block_hash": "c0ffee",
    "block_height": 100,
    "public_key": "node-key",
    "node_id": 0,
    "node_count": 1,
    "params": {"model": "toy", "seq_len": 64, "k_dim": 12},
}
ARTIFACT_ROUND: dict[str, JsonValue] = {**ARTIFACT_ORDER, "group_id": 1, "n_groups": 2}
DISTANCE_ROUND: dict[str, JsonValue] = {
    "block_hash": "abc123",
    "block_height": 100,
    "public_key": "node1",
    "r_target": 1.405,
    "node_id": 0,
    "node_count": 1,
}
# Of the round above; the second claim is not below its target.
DISTANCE_CLAIMS: dict[str, JsonValue] = {
    "public_key": "node1",
    "block_hash": "abc123",
    "block_height": 100,
    "nonces": [3, 17],
    "dist": [1.401, 1.409],
    "node_id": 0,
}
