"""Nodes that serve quantised checkpoints, in the formats that vLLM's CPU build computes."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import load
from proofserve.protocol.codec import decode
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.rounds.records import Workload
from proofserve.verifier.judges import OWN
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.node import PARAMS, ROUND, serve
from support.quantised import SERVED, Written, quantise

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NONCES: Final = range(16)
K_DIM: Final = 64
SKETCH: Final = {"scheme": "sketch-v1", "params": {**PARAMS, "k_dim": K_DIM}}


@pytest.fixture(params=SERVED)
def written(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Written:
    return quantise(tiny, tmp_path, *SERVED[request.param])


def test_a_node_that_serves_what_is_published_is_near_the_reference(
    written: Written, tiny: Path, tmp_path: Path
) -> None:
    work = Workload(scheme("sketch-v1"), Block(ROUND["block_hash"], 7), ROUND["public_key"], 64)
    with serve(written.folder, tmp_path, ("--dtype", "bfloat16")) as node:
        proved = node.prove([*NONCES], **SKETCH)["artifacts"]
    validator = CheckpointValidator(ValidatorSetup(written.folder), proofs_of(work, 8))
    truth, own = validator.truth(NONCES), validator.errors(OWN, NONCES)
    found = {each["nonce"]: decode(each["vector_b64"], 2 * K_DIM) for each in proved}
    errors = np.array([np.linalg.norm(found[n] - truth[n]) for n in NONCES])
    usual = np.array([np.linalg.norm(own[n]) for n in NONCES])
    # Its inputs are those of the quantised checkpoint, whose digest is part of every seed.
    original = replace(load(tiny, "float32", "cpu"), facts=validator.published.facts)
    before = ReferenceEngine(8).compute(work, original, NONCES).values
    unquantised = np.linalg.norm(before - np.array([truth[n] for n in NONCES]), axis=1)
    print(f"node {errors.mean():.4f}, own {usual.mean():.4f}, unquantised {unquantised.mean():.4f}")
    assert errors.mean() < 1.5 * usual.mean()
    assert errors.max() < 2 * usual.max()
