"""Smallest mixtures of experts, one for each family of routers that the reference engine knows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from proofserve.engines.reference.network import Network
from proofserve.protocol.scheme import AllowedTokens, ModelFacts
from support.written import network_from

EXPERTS: Final = 8
CHOSEN: Final = 2

_COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_experts_per_tok": CHOSEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: Final = {"head_dim": 16}
_COUNTED: Final = {"num_experts": EXPERTS}
_LOCAL: Final = {"num_local_experts": EXPERTS}
_SMALL: Final = {"moe_intermediate_size": 16}
_LINEAR: Final = {"layer_types": ["full_attention", "linear_attention"]}
_GROUPS: Final = {
    **{"n_routed_experts": EXPERTS, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    **{"n_shared_experts": 1, "routed_scaling_factor": 2.5, **_SMALL},
}
_LATENT: Final = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
}

# By the class of the router, the model's type in transformers and its own fields.
MIXTURES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "Qwen3MoeTopKRouter": ("qwen3_moe", {**_HEADS, **_COUNTED, **_SMALL, "norm_topk_prob": True}),
    "Qwen2MoeTopKRouter": (
        "qwen2_moe",
        {**_COUNTED, **_SMALL, "shared_expert_intermediate_size": 16, "norm_topk_prob": False},
    ),
    "Qwen3NextTopKRouter": (
        "qwen3_next",
        {
            **{**_HEADS, **_COUNTED, **_SMALL, **_LINEAR, "shared_expert_intermediate_size": 16},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
    ),
    "OlmoeTopKRouter": ("olmoe", _COUNTED),
    "FlexOlmoTopKRouter": ("flex_olmo", _COUNTED),
    "MixtralTopKRouter": ("mixtral", {**_HEADS, **_LOCAL}),
    "MiniMaxTopKRouter": ("minimax", {**_HEADS, **_LOCAL, **_LINEAR}),
    "HunYuanMoEV1Gate": ("hunyuan_v1_moe", {**_HEADS, **_COUNTED, "moe_topk": CHOSEN}),
    "DeepseekV3TopkRouter": ("deepseek_v3", {**_GROUPS, **_LATENT}),
    "Glm4MoeTopkRouter": ("glm4_moe", {**_HEADS, **_GROUPS, "norm_topk_prob": False}),
    "Glm4MoeLiteTopkRouter": (
        "glm4_moe_lite",
        {**_GROUPS, **_LATENT, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "Dots1TopkRouter": ("dots1", {**_HEADS, **_GROUPS}),
    "MiniMaxM2TopKRouter": ("minimax_m2", {**_HEADS, **_LOCAL}),
    "DeepseekV2TopkRouter": (
        "deepseek_v2",
        {**_GROUPS, **_LATENT, "topk_method": "group_limited_greedy"},
    ),
    "Ernie4_5_MoeTopKRouter": (
        "ernie4_5_moe",
        {
            **{**_HEADS, **_SMALL, "moe_num_experts": EXPERTS, "moe_k": CHOSEN},
            **{"moe_layer_start_index": 0, "moe_layer_interval": 1},
        },
    ),
    "GptOssTopKRouter": ("gpt_oss", {**_HEADS, **_LOCAL, "sliding_window": 16}),
    "GraniteMoeTopKRouter": ("granitemoe", _LOCAL),
}


def mixture(router: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Network:
    """The mixture with this router, its matrices seeded so that layers keep the inputs' scale."""
    name, own = MIXTURES[router]
    return network_of(name, dtype, **{**own, **fields})


def network_of(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Network:
    model = seeded_model(name, **fields)
    network = network_from(model.save_pretrained, str(dtype).removeprefix("torch."))
    hidden, tokens = network.config.hidden_size, AllowedTokens(((3, network.vocabulary),))
    return replace(network, facts=ModelFacts(hidden, "00" * 32, tokens))


def seeded_model(name: str, **fields: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **{**_COMMON, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    seeded(model)
    return model


@torch.no_grad()
def seeded(model: nn.Module) -> None:
    """Matrices of deviation 1/sqrt(fan in), numbers that routers add to scores of 0.1.

    All are numbers of bfloat16, so that a network in either dtype has the same weights.
    """
    generator = torch.Generator().manual_seed(1)
    for _, weight in sorted(model.named_parameters()):
        if weight.ndim >= 2:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            weight.copy_(weight.bfloat16())
    for name, values in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            values.normal_(0.0, 0.1, generator=generator)
