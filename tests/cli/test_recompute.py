"""The prover without a server computes the same vectors as other engines of the checkpoint."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from proofserve.protocol.codec import encode
from proofserve.protocol.identity import Block
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.records import Work
from proofserve.rounds.records import Workload
from proofserve_lab.checkpoints import claims_of_model
from proofserve_lab.nodes import distances
from proofserve_lab.orders import work_of_scheme
from support.models import SmallModels
from support.reference import reference_vectors

WORK = Work("tiny", seq_len=64)


def test_the_prover_agrees_with_a_reference_of_the_same_checkpoint(tiny: Path) -> None:
    ours = claims_of_model(tiny, WORK, range(5), forward_batch=2)
    workload = Workload(
        scheme("artifact-v1", k_dim=12), Block(WORK.block_hash, 7), WORK.public_key, 64
    )
    vectors = reference_vectors(tiny, workload, range(5), torch.float32)
    theirs = [Claim(n, text) for n, text in enumerate(encode(np.asarray(vectors)))]
    # Bfloat16 against float32.
    assert max(distances(ours, theirs, 12)) < 0.05


def test_the_prover_proves_the_scheme_and_height_of_the_order(tiny: Path) -> None:
    order = replace(work_of_scheme("sketch-v1", "tiny", 64), block_height=5)
    workload = Workload(scheme("sketch-v1"), Block(order.block_hash, 5), order.public_key, 64)
    vectors = reference_vectors(tiny, workload, range(3), torch.float32)
    theirs = [Claim(n, text) for n, text in enumerate(encode(np.asarray(vectors)))]
    assert max(distances(claims_of_model(tiny, order, range(3)), theirs, order.width)) < 0.05
    higher = claims_of_model(tiny, replace(order, block_height=6), range(3))
    assert min(distances(higher, theirs, order.width)) > 0.2


def test_another_checkpoint_gives_other_vectors(tiny: Path, small_models: SmallModels) -> None:
    other = small_models.get("qwen3", seed=1)
    ours = claims_of_model(tiny, WORK, range(4))
    theirs = claims_of_model(other, WORK, range(4))
    assert min(distances(ours, theirs, 12)) > 0.2


def test_the_prover_prints_nothing(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    claims_of_model(tiny, WORK, range(1))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_redrawn_matrices_give_another_model_that_is_always_the_same(tiny: Path) -> None:
    ours = claims_of_model(tiny, WORK, range(4))
    redrawn = claims_of_model(tiny, WORK, range(4), redrawn=True)
    assert min(distances(ours, redrawn, 12)) > 0.2
    assert redrawn == claims_of_model(tiny, WORK, range(4), redrawn=True)
