"""The models must be worth proving: a cheat shows far above the noise of honest rounding."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from proofserve.models.architectures import ARCHITECTURES, SHAPES
from proofserve.models.writer import ModelSummary, seeded_weights
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import ModelFacts
from proofserve.protocol.schemes import scheme

CPU = torch.device("cpu")
KEY = "node-key"
NONCES = range(4)
SEQ_LEN = 128


@dataclass(frozen=True)
class Moves:
    """L2 distances from the honest bfloat16 vectors, one per nonce.

    ``rounding`` is the move of a float32 run of the same weights, ``cut`` that of a run which
    reads only the last quarter of its context, ``drops`` [layers, nonces] that of a run without
    the layer.
    """

    rounding: Tensor
    cut: Tensor
    drops: Tensor

    @property
    def margin(self) -> float:
        """How many times further the subtlest cheat moves the vectors than rounding does."""
        weakest = min(self.cut.mean(), self.drops.mean(dim=1).min())
        return float(weakest / self.rounding.mean())


@torch.inference_mode()
def _moves(model: PreTrainedModel) -> Moves:
    model = model.to(torch.bfloat16).eval()
    hidden = model.config.hidden_size
    block = scheme("artifact-v1", k_dim=12).for_block(Block("block-1", 7), ModelFacts(hidden), CPU)
    inputs = block.inputs(KEY, NONCES, SEQ_LEN, torch.bfloat16)

    def vectors(embeds: Tensor) -> Tensor:
        states = model.model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return block.finish(KEY, NONCES, states[:, -1])

    honest = vectors(inputs)

    def moved(others: Tensor) -> Tensor:
        return torch.linalg.vector_norm(others - honest, dim=1)

    cut = moved(vectors(inputs[:, -SEQ_LEN // 4 :]))
    drops = []
    for layer in model.model.layers:
        # A hook that answers with the layer's own input: the layer is as good as gone.
        handle = layer.register_forward_hook(lambda _module, args, _output: args[0])
        drops.append(moved(vectors(inputs)))
        handle.remove()
    model.float()
    return Moves(moved(vectors(inputs.float())), cut, torch.stack(drops))


def test_a_cheat_moves_the_vectors_ten_times_as_far_as_rounding(tiny: ModelSummary) -> None:
    moves = _moves(AutoModelForCausalLM.from_pretrained(tiny.path))
    assert len(moves.drops) == SHAPES["tiny"].layers
    if ARCHITECTURES[tiny.arch].chosen > 1:
        # Rounding alone changes the experts of some tokens, and moves vectors further.
        assert moves.margin > 2
        return
    assert moves.rounding.mean() < 0.03
    assert moves.margin > 10
    # Not on average alone: no single nonce may hide a cheat, either.
    assert min(moves.cut.min(), moves.drops.min()) > 5 * moves.rounding.max()


def test_the_usual_initialisation_would_not_pass() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.02,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        naive = AutoModelForCausalLM.from_config(config)
    assert naive.model.layers[0].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    moves = _moves(naive)
    assert moves.margin < 10
    assert moves.cut.mean() < 10 * moves.rounding.mean()
    assert moves.drops.mean(dim=1).min() < 10 * moves.rounding.mean()


def test_tokens_enter_at_the_scale_of_a_proof(tiny: ModelSummary) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    embedded = model.get_input_embeddings()(torch.arange(2048)).float()
    assert embedded.mean().item() == pytest.approx(0.0, abs=0.01)
    assert embedded.std().item() == pytest.approx(1.0, rel=0.01)


def test_a_dtype_only_rounds_the_same_numbers() -> None:
    family = ARCHITECTURES["qwen3"]
    config = family.config(SHAPES["tiny"])
    exact = dict(seeded_weights(family, config, 3, torch.float32))
    for name, rounded in seeded_weights(family, config, 3, torch.bfloat16):
        assert torch.equal(rounded, exact[name].to(torch.bfloat16))


def test_no_two_tensors_share_their_numbers() -> None:
    family = ARCHITECTURES["llama"]
    weights = dict(seeded_weights(family, family.config(SHAPES["tiny"]), 0, torch.float32))
    squares = [weights[f"model.layers.{i}.self_attn.o_proj.weight"] for i in range(6)]
    flat = torch.stack([square.flatten() for square in squares])
    correlations = torch.corrcoef(flat) - torch.eye(len(squares))
    assert correlations.abs().max().item() < 0.02
