"""The vectors of fixed nonces and the speed of forwards, by this process's own vLLM."""

from pathlib import Path
from typing import Final

from matrix.results import Measured
from measuring.results import Kept
from proofserve.cli.model import checkpoint_named
from proofserve.cli.servers import ServerOptions, serving
from proofserve.cli.session import CommandSession
from proofserve.remote.records import work_of_scheme

# By trained model, the scheme of its calibration, which says how far honest engines are apart.
SCHEMES: Final = {"trained": "sketch-v1", "trained_moe": "sketch-v2"}
SEQ_LEN = 256
NONCES = 64
FORWARD_BATCH = 8
FORWARDS = 20


def write_vectors(model: str, folder: Path, session: CommandSession) -> None:
    """Start a server, prove the nonces, and keep what it gave in ``folder``."""
    found = checkpoint_named(model, "tiny")
    work = work_of_scheme(SCHEMES[model], found.name, SEQ_LEN)
    options = ServerOptions(found.folder, found.name, FORWARD_BATCH, measure=True)
    with serving(options, session) as node:
        vectors = {str(a.nonce): a.vector_b64 for a in node.artifacts(work, range(NONCES))}
        node.measure(work, FORWARDS)
        speed = node.measure(work, FORWARDS).nonces_per_second
        made = Measured(node.versions()["vllm"], speed, work.width, vectors)
    Kept(Measured, folder).write(model, made)
