"""The two models that are trained: what each is built of, and how long it learns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from proofserve.models.architectures import BOS, EOS_IDS, PAD, SPECIALS, VOCABULARY
from proofserve.models.trained import DENSE, MIXTURE

SEED: Final = 0
_COMMON: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": SPECIALS.index(BOS),
    "eos_token_id": list(EOS_IDS),
    "pad_token_id": SPECIALS.index(PAD),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one model is made. Other values of any field give other weights.

    ``threads`` counts those of torch, whose sums round differently for another number.
    ``half_products`` says whether products are computed in bfloat16: half the time on a processor
    with matrix units, more time on others. ``balance`` weighs the loss of experts that are
    unequally used against that of the text.
    """

    config: Callable[[], PreTrainedConfig]
    steps: int
    threads: int
    half_products: bool
    balance: float = 0.0

    def new_model(self) -> PreTrainedModel:
        """The model before training, in float32, always the same."""
        torch.manual_seed(SEED)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(self.config())
        return made.float()


def _dense() -> PreTrainedConfig:
    """3.5 million parameters, even counts for two ranks or stages."""
    return Qwen3Config(**_COMMON, intermediate_size=384, head_dim=64)


def _mixture() -> PreTrainedConfig:
    """5.9 million parameters, 2.3 million of them for each token.

    Half an expert, which is what one of two ranks holds, is as wide as vLLM's kernels for
    processors want.
    """
    return Qwen3MoeConfig(
        **_COMMON,
        head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    )


RECIPES: Final[Mapping[str, Recipe]] = {
    DENSE.name: Recipe(_dense, steps=700, threads=2, half_products=True),
    MIXTURE.name: Recipe(_mixture, steps=450, threads=1, half_products=False, balance=0.02),
}
