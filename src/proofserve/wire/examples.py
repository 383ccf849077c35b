"""Examples of request bodies, for the OpenAPI page."""

from pydantic import JsonValue

from proofserve.protocol import ARTIFACT_K_DIM, SEQ_LEN, SKETCH, SKETCH_K_DIM

_WORK_EXAMPLE: dict[str, JsonValue] = {
    "block_hash": "c0ffee",
    "block_height": 100,
    "public_key": "node-key",
    "node_id": 0,
}
ARTIFACT_EXAMPLE: dict[str, JsonValue] = {
    **_WORK_EXAMPLE,
    "node_count": 1,
    "params": {"model": "toy", "seq_len": SEQ_LEN, "k_dim": ARTIFACT_K_DIM},
}
ARTIFACT_ROUND_EXAMPLE: dict[str, JsonValue] = {**ARTIFACT_EXAMPLE, "group_id": 1, "n_groups": 2}
JOB_EXAMPLES: list[JsonValue] = [
    {**ARTIFACT_EXAMPLE, "nonces": [0, 1, 2]},
    {
        **ARTIFACT_EXAMPLE,
        "nonces": [7],
        "wait": True,
        "validation": {"artifacts": [{"nonce": 7, "vector_b64": "A" * 32}]},
        "stat_test": {"dist_threshold": 0.4, "p_mismatch": 0.1},
    },
    {
        **ARTIFACT_EXAMPLE,
        "params": {"model": "toy", "seq_len": SEQ_LEN, "k_dim": SKETCH_K_DIM},
        "scheme": SKETCH,
        "nonces": [0, 1, 2],
    },
]
DISTANCE_ROUND_EXAMPLE: dict[str, JsonValue] = {**_WORK_EXAMPLE, "node_count": 1, "r_target": 1.405}
# Claims for the round above; the second distance is not below its target.
DISTANCE_CLAIMS_EXAMPLE: dict[str, JsonValue] = {
    **_WORK_EXAMPLE,
    "nonces": [3, 17],
    "dist": [1.401, 1.409],
}
