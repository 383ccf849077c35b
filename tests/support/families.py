"""Decoders of every family that transformers writes in its own way, small and in memory."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_LAYERS = 2
_EXPERTS = 4
# Inputs of matrices are longer than the longest chunk that a profile adds up.
_COMMON: Final[Mapping[str, Any]] = {
    **{"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": _LAYERS},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 320},
    **{"max_position_embeddings": 512, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
# All experts are chosen: nearly equal scores would choose others after rounding.
_MIXTURE: Final[Mapping[str, Any]] = {"num_experts_per_tok": _EXPERTS}

FAMILIES: Final[Mapping[str, Callable[[], PreTrainedConfig]]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_COMMON, head_dim=32),
    "llama": lambda: transformers.LlamaConfig(**_COMMON, head_dim=32),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_COMMON, head_dim=32, sliding_window=16, query_pre_attn_scalar=32
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, **_MIXTURE, head_dim=32, moe_intermediate_size=320, num_experts=_EXPERTS
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **_COMMON, **_MIXTURE, head_dim=32, num_local_experts=_EXPERTS, sliding_window=16
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_COMMON,
        **_MIXTURE,
        **{"n_routed_experts": _EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 320},
        **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
        **{"qk_rope_head_dim": 32, "v_head_dim": 64},
    ),
}


def model_of(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with seeded weights that bfloat16 holds exactly, in ``dtype``."""
    with torch.random.fork_rng():
        # Some biases are born random.
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            _draw(name, weight, generator)
    return model.to(dtype).eval()


def _draw(name: str, weight: nn.Parameter, generator: torch.Generator) -> None:
    if weight.ndim < 2:
        weight.add_(torch.randn(weight.shape, generator=generator) / 8)
    else:
        size = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
        weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    weight.copy_(weight.to(torch.bfloat16))
