from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from proofserve.engines import CheckpointError
from proofserve.engines.reference.network import Network, load
from proofserve.engines.reference.suspects import SUSPECTS
from proofserve.models.architectures import ARCHITECTURES, SHAPES
from proofserve.protocol.network_schemes import ArtifactScheme
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.sketch import SketchScheme
from proofserve.protocol.verdict.directions import cosine
from proofserve.rounds.records import Workload
from proofserve.verifier.audit.attacks import attacks
from proofserve.verifier.audit.deployment import (
    BLOCK,
    KEY,
    PRUNED_EXPERTS,
    AuditedProver,
    AuditSetup,
    CheckpointDeployment,
    Price,
    price_of,
)
from proofserve.verifier.judges import BankRun, Recompute, Vectors
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from support.models import SmallModels

NONCES = range(3)


@pytest.fixture(scope="module", params=[ArtifactScheme(), SketchScheme()], ids=lambda s: s.name)
def setup(request: pytest.FixtureRequest, tiny: Path) -> AuditSetup:
    return AuditSetup(tiny, scheme=request.param, seq_len=32, forward_batch=4)


@pytest.fixture(scope="module")
def deployment(setup: AuditSetup) -> CheckpointDeployment:
    return CheckpointDeployment(setup)


def farthest(some: Vectors, others: Vectors) -> float:
    return max(float(np.linalg.norm(some[nonce] - others[nonce])) for nonce in NONCES)


def nearest(some: Vectors, others: Vectors) -> float:
    return min(float(np.linalg.norm(some[nonce] - others[nonce])) for nonce in NONCES)


def by_name(deployment: CheckpointDeployment) -> dict[str, AuditedProver]:
    return {each.name: each for each in deployment.weights()}


def test_the_shape_is_the_checkpoints(deployment: CheckpointDeployment, setup: AuditSetup) -> None:
    sketches = setup.scheme.name == "sketch-v1"
    assert deployment.price == Price(256, 6, 4, 2, 64, 512, setup.seq_len, sketches)
    assert deployment.width == (128 if sketches else 12)
    assert not deployment.mixes_experts


def test_a_mixture_is_counted_by_the_experts_a_token_visits() -> None:
    def price(config: object) -> Price:
        checkpoint = SimpleNamespace(config=config, shapes=[nn.Identity()] * 3)
        return price_of(Network(checkpoint, ModelFacts(64), torch.device("cpu")), 8)  # type: ignore[arg-type]

    small = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    mixtral = MixtralConfig(**small, num_experts_per_tok=2, num_key_value_heads=2)
    assert price(mixtral) == Price(64, 3, 4, 2, 16, 192, 8)
    fine = Qwen3MoeConfig(
        **small, moe_intermediate_size=10, num_experts_per_tok=8, num_key_value_heads=2, head_dim=8
    )
    assert price(fine) == Price(64, 3, 4, 2, 8, 80, 8)


def test_a_validator_differs_by_rounding(deployment: CheckpointDeployment) -> None:
    honest, validator = deployment.deployed(NONCES), deployment.truth(NONCES)
    assert 0 < farthest(honest, validator) < 0.1


def test_honest_kernels_differ_by_rounding(deployment: CheckpointDeployment) -> None:
    honest, truth = deployment.deployed(NONCES), deployment.truth(NONCES)
    provers = list(deployment.kernels())
    assert len(provers) >= 8
    for each in provers:
        made = each.prepare()(NONCES)
        assert 0 < farthest(made, truth) < 0.1, each.name
        assert farthest(made, honest) > 0, each.name
        assert each.saving == 0.0


def test_every_prover_rounds_as_one_kernel(setup: AuditSetup) -> None:
    """Changed weights alone are no reason for a prover to round less than an honest node."""
    validator = CheckpointValidator(
        ValidatorSetup(setup.model), proofs_of(Workload(setup.scheme, BLOCK, KEY, 32), 4)
    )
    deployment = CheckpointDeployment(setup)
    kernel = BankRun(kernels="vLLM on x86 with bfloat16")
    assert farthest(deployment.deployed(NONCES), validator.vectors(kernel, NONCES)) == 0.0
    served = by_name(deployment)["fp8 per channel"].prepare()(NONCES)
    run = replace(kernel, weights="fp8 per channel")
    assert farthest(served, validator.vectors(run, NONCES)) == 0.0


def test_only_honest_provers_have_the_footprint_of_the_validators_own_run(
    setup: AuditSetup,
) -> None:
    deployment = CheckpointDeployment(setup)
    own = next(each for each in deployment.kernels() if each.name == deployment.reference)
    provers = by_name(deployment)

    def kept(made: Recompute) -> float:
        # A cosine of 12 values says little.
        nonces = range(24)
        truth, ours, theirs = (of(nonces) for of in (deployment.truth, own.prepare(), made))
        return float(np.mean([cosine(theirs[n] - truth[n], ours[n] - truth[n]) for n in nonces]))

    assert 0.3 < kept(deployment.deployed) < 0.99
    for name in ("int8 per channel", "int8 g32, rotated in private"):
        assert kept(provers[name].prepare()) < 0.5 * kept(deployment.deployed), name


def test_the_bank_and_private_weights_are_provers(deployment: CheckpointDeployment) -> None:
    provers = by_name(deployment)
    assert {*SUSPECTS} < provers.keys()
    private = provers.keys() - {*SUSPECTS}
    assert private == {
        *("int8 per channel by chance", "int8 g32 by chance", "int8 g48, private"),
        "int8 g32, rotated in private",
        *("int8 per channel on half of the layers", "KV cache in int8"),
        *("attention in int8", "pruned 2:4"),
        *("half of the rank", "a quarter of the rank"),
    }
    truth, honest = deployment.truth(NONCES), deployment.deployed(NONCES)
    for name, prover in provers.items():
        made = prover.prepare()(NONCES)
        assert farthest(made, honest) > 0, name
        assert nearest(made, truth) < 1.5, name
        assert 0.0 <= prover.saving < 1.0


def test_a_mixture_may_lack_its_least_used_experts(small_models: SmallModels) -> None:
    natural = CheckpointDeployment(
        AuditSetup(
            small_models.get("qwen3_moe"), scheme=SketchScheme(), seq_len=32, forward_batch=4
        )
    )
    assert natural.mixes_experts
    seeded = natural.with_routing(SketchScheme(seeded_experts=True))
    assert nearest(seeded.truth(NONCES), natural.truth(NONCES)) > 0.2
    for deployment in (natural, seeded):
        provers = by_name(deployment)
        quarter, half = (provers[name] for name in PRUNED_EXPERTS)
        assert 0.1 < quarter.saving == half.saving / 2 < 0.25
        truth = deployment.truth(NONCES)
        honest = farthest(deployment.deployed(NONCES), truth)
        few, many = (nearest(each.prepare()(NONCES), truth) for each in (quarter, half))
        assert 3 * honest < min(few, many)
        # With other experts for each token a quarter makes vectors that have nothing in common.
        assert few < many or few > 1.35


def test_every_attack_on_a_mixture_has_vectors_where_the_block_chooses_its_experts(
    small_models: SmallModels,
) -> None:
    scheme = SketchScheme(seeded_experts=True)
    deployment = CheckpointDeployment(
        AuditSetup(small_models.mixture(), scheme=scheme, seq_len=16, forward_batch=1)
    )
    made = {each.name: each.prepare()([0])[0] for each in attacks(deployment, 0.01)}
    assert {"model skipped", "first token only", *PRUNED_EXPERTS} < made.keys()
    assert all(np.isfinite(vector).all() for vector in made.values())


def test_savings_follow_bits_and_shapes(deployment: CheckpointDeployment) -> None:
    saving = {name: each.saving for name, each in by_name(deployment).items()}
    assert saving["int8 g32"] == saving["fp8 per channel"] == saving["W8A8 int8"]
    assert saving["int8 g32"] < saving["int6 g16"] < saving["int4 g32"] == saving["nvfp4"]
    assert saving["int8 per channel on half of the layers"] == saving["int8 g32"] / 2
    assert saving["pruned 2:4"] == saving["int8 g32"]
    # Factors of a square matrix at half of the rank are as large as itself.
    assert 0 <= saving["half of the rank"] < saving["a quarter of the rank"]
    assert 0 < saving["KV cache in fp8"] == saving["KV cache in int8"] < saving["int8 g32"]


def test_more_bits_are_nearer(deployment: CheckpointDeployment) -> None:
    validator, provers = deployment.truth(NONCES), by_name(deployment)
    names = ("int8 g32", "int6 g16", "int4 g32")
    eight, six, four = (farthest(provers[n].prepare()(NONCES), validator) for n in names)
    assert eight < six < four


def test_a_suspect_predicts_its_own_prover(deployment: CheckpointDeployment) -> None:
    truth = deployment.truth(NONCES)
    for name in ("int4 g128", "fp8 per channel"):
        predicted = deployment.predictions(name, NONCES)
        made = by_name(deployment)[name].prepare()(NONCES)
        for nonce in NONCES:
            assert cosine(made[nonce] - truth[nonce], predicted[nonce]) > 0.9


def test_cheats_are_far_and_leave_the_honest_prover_alone(deployment: CheckpointDeployment) -> None:
    honest = deployment.deployed(NONCES)
    for prepare in (
        lambda: deployment.without_layers([0]),
        lambda: deployment.some_tokens(4),
        deployment.other_checkpoint().prepare,
        deployment.other_key,
        deployment.other_block,
    ):
        assert nearest(prepare()(NONCES), honest) > 0.2
    assert farthest(deployment.without_layers([])(NONCES), honest) == 0.0
    assert farthest(deployment.some_tokens(32)(NONCES), honest) == 0.0


def test_the_bank_can_be_a_part_and_have_checkpoints_added(
    setup: AuditSetup, small_models: SmallModels
) -> None:
    sibling = small_models.get("qwen3", seed=1)
    bank = ("int8 g32", "int4 g128")
    deployment = CheckpointDeployment(replace(setup, bank=bank, suspects=(sibling,)))
    assert [*deployment.names] == ["int4 g128", "int8 g32", sibling.name]
    provers = by_name(deployment)
    assert {*SUSPECTS} & provers.keys() == {*bank}
    # A file as large as the model's saves nothing.
    assert provers[sibling.name].saving == 0.0
    made, truth = provers[sibling.name].prepare()(NONCES), deployment.truth(NONCES)
    predicted = deployment.predictions(sibling.name, NONCES)
    assert cosine(made[0] - truth[0], predicted[0]) > 0.99


def test_a_cache_in_fp8_is_no_attack_where_it_is_allowed(setup: AuditSetup) -> None:
    deployment = CheckpointDeployment(replace(setup, kv_dtype="fp8"))
    assert "KV cache in fp8" not in deployment.names
    assert "KV cache in fp8" not in by_name(deployment)
    assert "our own rounding with a cache in fp8" in [each.name for each in deployment.kernels()]


def test_another_checkpoint_reads_the_same_inputs(
    setup: AuditSetup, small_models: SmallModels
) -> None:
    sibling = replace(setup, other=small_models.get("qwen3", seed=1))
    other = CheckpointDeployment(sibling).other_checkpoint()
    assert (other.name, other.saving) == ("another checkpoint", 0.0)
    vectors = other.prepare()(NONCES)
    assert nearest(vectors, CheckpointDeployment(setup).deployed(NONCES)) > 0.2


def test_a_smaller_checkpoint_saves_what_it_leaves_out(
    setup: AuditSetup, small_models: SmallModels
) -> None:
    # It has four of six layers, and the same hidden size.
    smaller = CheckpointDeployment(replace(setup, other=small_models.flat())).other_checkpoint()
    assert smaller.name == "a smaller checkpoint"
    assert smaller.saving == pytest.approx(1 / 3, abs=0.05)
    assert len(smaller.prepare()(NONCES)) == 3
    larger = CheckpointDeployment(
        AuditSetup(small_models.flat(), scheme=ArtifactScheme(), seq_len=32, other=setup.model)
    )
    assert larger.other_checkpoint().saving == 0.0


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 128), ("vocab_size", 16)])
def test_a_checkpoint_that_cannot_read_the_inputs_is_named(
    setup: AuditSetup, tmp_path: Path, field: str, value: int
) -> None:
    config = ARCHITECTURES["qwen3"].config(SHAPES["tiny"])
    setattr(config, field, value)
    config.pad_token_id = None
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    deployment = CheckpointDeployment(replace(setup, other=tmp_path))
    name = "vocabulary" if field == "vocab_size" else field
    with pytest.raises(CheckpointError, match=f"{name}: .* has {value}, .* has "):
        deployment.other_checkpoint()


def test_the_weights_drawn_are_the_same_each_time(deployment: CheckpointDeployment) -> None:
    some, others = (deployment.other_checkpoint().prepare()(NONCES) for _ in range(2))
    assert farthest(some, others) == 0.0


def test_the_flat_model_is_what_it_says(small_models: SmallModels) -> None:
    network: Network = load(small_models.flat(), None, "cpu")
    assert len(network.shapes) == 4
    checkpoint = network.checkpoint
    parts = [*map(checkpoint.layer, range(4)), checkpoint.decoder.norm, checkpoint.head]
    for name, weight in (named for part in parts for named in part.named_parameters()):
        if weight.ndim == 2:
            assert abs(float(weight.detach().float().std()) - 0.02) < 0.002, name
        else:
            assert torch.equal(weight, torch.ones_like(weight)), name
