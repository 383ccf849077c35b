"""The two proof protocols as pure functions of tensors and numbers: no clock, no I/O, no settings.

Start with ``schemes``; ``verdict`` judges what a scheme computed. Only ``nonces.fresh_seed`` is
random. Here are the names of the schemes, and the one scheme and shape of work that does not say
its own, for nodes and all commands: they fit each other. That a request without a scheme is of
``artifact-v1`` is the network's protocol (B), and stays so.
"""

from typing import Final

ARTIFACT: Final = "artifact-v1"
ARTIFACT_LAYERS: Final = "artifact-v1-layers"
SKETCH: Final = "sketch-v1"
SKETCH_2: Final = "sketch-v2"
SKETCHES: Final = (SKETCH, SKETCH_2)
# A nonce of a sketch has two sequences, and a vector of each.
TWINS: Final = 2
DISTANCE: Final = "distance-v1"

DEFAULT_SCHEME: Final = ARTIFACT
# Tokens per nonce.
SEQ_LEN: Final = 256
ARTIFACT_K_DIM: Final = 12
SKETCH_K_DIM: Final = 64


def default_k_dim(scheme: str) -> int:
    """The number of values of a scheme with vectors: of a sketch, those of one twin."""
    return SKETCH_K_DIM if scheme in SKETCHES else ARTIFACT_K_DIM
