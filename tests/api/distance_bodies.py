"""Bodies of the distance protocol, for a server with the toy engine."""

from typing import Any

INIT, INIT_VALIDATE = "/init", "/init/validate"
PHASE_GENERATE, PHASE_VALIDATE, VALIDATE = "/phase/generate", "/phase/validate", "/validate"
ROUND: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 1,
    "node_count": 3,
    "r_target": 1.41,
    "seq_len": 16,
    "batch_size": 8,
}
CLAIMS: dict[str, Any] = {
    "public_key": "key",
    "block_hash": "block",
    "block_height": 7,
    "nonces": [1, 4, 7],
    "dist": [0.3, 0.4, 0.5],
    "node_id": 0,
}
