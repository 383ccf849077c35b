from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, Qwen3MoeConfig

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network, load
from proofserve.lab.audit.compute_share import ModelShape
from proofserve.lab.verify.judges import Vectors
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.wiring.audit import AuditSetup, CheckpointDeployment, shape_of
from support.models import SmallModels

NONCES = range(3)


@pytest.fixture(scope="module")
def setup(tiny: Path) -> AuditSetup:
    return AuditSetup(tiny, ArtifactScheme(), seq_len=32, forward_batch=4)


@pytest.fixture(scope="module")
def deployment(setup: AuditSetup) -> CheckpointDeployment:
    return CheckpointDeployment(setup)


def farthest(some: Vectors, others: Vectors) -> float:
    return max(float(np.linalg.norm(some[nonce] - others[nonce])) for nonce in NONCES)


def nearest(some: Vectors, others: Vectors) -> float:
    return min(float(np.linalg.norm(some[nonce] - others[nonce])) for nonce in NONCES)


def test_the_shape_is_the_checkpoints(deployment: CheckpointDeployment) -> None:
    assert deployment.price.shape == ModelShape(256, 6, 4, 2, 64, 512)
    assert deployment.k_dim == 12


def test_a_mixture_is_counted_by_the_experts_a_token_visits(tiny: Path) -> None:
    def shape(config: object) -> ModelShape:
        decoder = nn.Module()
        decoder.config = config
        decoder.layers = nn.ModuleList([nn.Identity()] * 3)
        return shape_of(replace(load(tiny, None, "cpu"), decoder=decoder))

    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    mixtral = MixtralConfig(**small, num_experts_per_tok=2, num_key_value_heads=2)
    assert shape(mixtral) == ModelShape(64, 3, 4, 2, 16, 192)
    fine = Qwen3MoeConfig(
        **small, moe_intermediate_size=10, num_experts_per_tok=8, num_key_value_heads=2, head_dim=8
    )
    assert shape(fine) == ModelShape(64, 3, 4, 2, 8, 80)


def test_a_validator_differs_by_rounding(deployment: CheckpointDeployment) -> None:
    honest, validator = deployment.honest()(NONCES), deployment.validator()(NONCES)
    assert 0 < farthest(honest, validator) < 0.1


def test_more_bits_are_nearer(deployment: CheckpointDeployment) -> None:
    validator = deployment.validator()(NONCES)
    eight, six, fp8, four = (
        farthest(deployment.rounded(precision)(NONCES), validator) for precision in (8, 6, "fp8", 4)
    )
    assert eight < six < four
    assert eight < fp8 < four


def test_cheats_are_far_and_leave_the_honest_prover_alone(deployment: CheckpointDeployment) -> None:
    honest = deployment.honest()(NONCES)
    for prepare in (
        lambda: deployment.without_layers([0]),
        lambda: deployment.last_tokens(4),
        deployment.other_checkpoint,
        deployment.other_key,
        deployment.other_block,
    ):
        assert nearest(prepare()(NONCES), honest) > 0.2
    assert farthest(deployment.honest()(NONCES), honest) == 0.0
    assert farthest(deployment.last_tokens(32)(NONCES), honest) == 0.0


def test_another_checkpoint_is_of_the_same_shape(
    setup: AuditSetup, small_models: SmallModels
) -> None:
    sibling = replace(setup, other=small_models.get("qwen3", seed=1))
    other = CheckpointDeployment(sibling).other_checkpoint()(NONCES)
    itself = CheckpointDeployment(replace(setup, model=sibling.other or setup.model))
    assert farthest(other, itself.honest()(NONCES)) == 0.0
    with pytest.raises(CheckpointError, match="is not of the shape of"):
        CheckpointDeployment(replace(setup, other=small_models.flat())).other_checkpoint()


def test_the_weights_drawn_are_the_same_each_time(deployment: CheckpointDeployment) -> None:
    some, others = (deployment.other_checkpoint()(NONCES) for _ in range(2))
    assert farthest(some, others) == 0.0


def test_the_flat_model_is_what_it_says(small_models: SmallModels) -> None:
    network: Network = load(small_models.flat(), None, "cpu")
    assert len(network.layers) == 4
    for name, weight in network.decoder.named_parameters():
        if weight.ndim == 2:
            assert abs(float(weight.detach().float().std()) - 0.02) < 0.002, name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name
