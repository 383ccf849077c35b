"""What small models are made of: their tokenizer, and the table of architectures and sizes.

Every model has the same tokenizer, a byte-level BPE learned from the text in this package.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

# They mark places in a conversation and never stand for text. The trainer numbers them in this
# order from 0.
SPECIALS: Final = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
PAD, BOS, TURN_START, TURN_END, TEXT_END = SPECIALS
# TURN_END ends a reply, TEXT_END ends a plain completion.
EOS_IDS: Final = (SPECIALS.index(TURN_END), SPECIALS.index(TEXT_END))

VOCABULARY: Final = 2048
"""Tokens, specials included: as many as the text is enough for; kernels need a multiple of 64."""

# Any role is accepted: these random models answer nonsense to a system prompt as to any other.
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def corpus() -> str:
    return resources.files("proofserve.models").joinpath("corpus.txt").read_text("utf-8")


def build_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer, on the same text each time, for a model of ``context`` positions."""
    tokenizer = Tokenizer(models.BPE())
    # No normaliser: decoding gives back the input, byte for byte.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus().splitlines(keepends=True), trainer)
    # A plain completion of an empty prompt still has a token to begin with.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, SPECIALS.index(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, TEXT_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of one size, the same for every architecture.

    Heads and KV heads are even for two tensor-parallel ranks, layers for two pipeline stages.
    ``head_dim`` is one that vLLM's CPU attention has a kernel for. ``sliding_window`` (tokens)
    is shorter than a default proof of 256 tokens; otherwise it would not affect a proof.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    context: int = 8192
    sliding_window: int = 128


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of models: its class in transformers, its configuration, its properties.

    ``norm_offset`` is what the family's RMSNorm adds to its weight. ``norms_queries`` says
    whether queries and keys are normalised per head, in which case only the gain of that norm,
    and not the scale of the projection, sets the spread of the attention scores. ``scales_tokens``
    says whether the model multiplies the embeddings of tokens by the square root of the hidden
    size; it never multiplies embeddings that are its input. ``chosen`` counts the experts of a
    token, 1 without experts; ``inputs_first`` says whether their matrices are [inputs, outputs].
    """

    class_name: str
    config: Callable[[Shape], PreTrainedConfig]
    norm_offset: float = 0.0
    norms_queries: bool = False
    scales_tokens: bool = False
    chosen: int = 1
    inputs_first: bool = False


def _common(shape: Shape) -> dict[str, int | float | bool | list[int]]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-6,
        # A tied head would make a random model repeat its last token: the residual stream still
        # holds that token's embedding, and nothing scores higher against the head.
        "tie_word_embeddings": False,
        "bos_token_id": SPECIALS.index(BOS),
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": SPECIALS.index(PAD),
    }


def _gemma3(shape: Shape) -> PreTrainedConfig:
    return Gemma3TextConfig(
        **_common(shape),
        # Two sliding layers, then one with full attention: half of the smallest model, which is
        # what one of two pipeline stages holds, has both, and vLLM several groups of KV blocks.
        sliding_window_pattern=3,
        sliding_window=shape.sliding_window,
        query_pre_attn_scalar=shape.head_dim,
    )


def _qwen3_moe(shape: Shape) -> PreTrainedConfig:
    """32 experts, of which 4 together are as wide as the dense model of this size."""
    return Qwen3MoeConfig(
        **_common(shape),
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=shape.intermediate // 4,
        norm_topk_prob=True,
    )


def _gpt_oss(shape: Shape) -> PreTrainedConfig:
    """8 experts, 2 a token; biases everywhere, a sink in each head, every second layer slides."""
    # vLLM writes chats of this family in a vocabulary of so many tokens, whatever the tokenizer.
    own = {"vocab_size": 201_088, "intermediate_size": shape.intermediate // 2}
    return GptOssConfig(
        # vLLM has this epsilon in its code.
        **{**_common(shape), **own, "rms_norm_eps": 1e-5},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=shape.sliding_window,
        # vLLM reads no other kind of positions for this family. The default stretches them to a
        # context that this model does not have.
        rope_parameters={
            **{"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 4.0},
            "original_max_position_embeddings": shape.context // 4,
            **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    )


def _deepseek_v3(shape: Shape) -> PreTrainedConfig:
    """Latent attention, 16 experts in 4 groups beside a shared one, the first layer dense."""
    common = _common(shape)
    del common["head_dim"]
    config = DeepseekV3Config(
        **{**common, "num_key_value_heads": shape.heads},
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
        moe_intermediate_size=shape.intermediate // 4,
        num_nextn_predict_layers=0,
        q_lora_rank=shape.hidden // 2,
        kv_lora_rank=512,
        qk_nope_head_dim=shape.head_dim,
        qk_rope_head_dim=64,
        v_head_dim=shape.head_dim,
    )
    # vLLM reads both of the config, as published ones have them; transformers has them in its code.
    config.topk_method = "noaux_tc"
    config.scoring_func = "sigmoid"
    return config


def _mixtral(shape: Shape) -> PreTrainedConfig:
    """8 experts, 2 a token."""
    common = {**_common(shape), "intermediate_size": shape.intermediate // 2}
    return MixtralConfig(**common, num_local_experts=8, num_experts_per_tok=2)


def _minimax_m2(shape: Shape) -> PreTrainedConfig:
    """32 experts, 4 a token; half of a head rotates, one norm has the queries of all heads."""
    config = MiniMaxM2Config(
        **{**_common(shape), "intermediate_size": shape.intermediate // 4},
        num_local_experts=32,
        num_experts_per_tok=4,
        rotary_dim=shape.head_dim // 2,
    )
    # vLLM reads all three of the config, as published ones have them.
    config.rotary_dim = shape.head_dim // 2
    config.use_routing_bias = True
    config.scoring_func = "sigmoid"
    return config


def _qwen3_next(shape: Shape) -> PreTrainedConfig:
    """16 experts, 4 a token, beside a shared one; three of four layers have linear attention."""
    return Qwen3NextConfig(
        **_common(shape),
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=shape.intermediate // 4,
        shared_expert_intermediate_size=shape.intermediate // 4,
        linear_num_key_heads=shape.kv_heads,
        linear_num_value_heads=shape.heads,
        linear_key_head_dim=shape.head_dim,
        linear_value_head_dim=shape.head_dim,
    )


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "qwen3": Architecture(
        "Qwen3ForCausalLM", lambda shape: Qwen3Config(**_common(shape)), norms_queries=True
    ),
    "llama": Architecture("LlamaForCausalLM", lambda shape: LlamaConfig(**_common(shape))),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", _gemma3, norm_offset=1.0, norms_queries=True, scales_tokens=True
    ),
    "qwen3_moe": Architecture("Qwen3MoeForCausalLM", _qwen3_moe, norms_queries=True, chosen=4),
    "gpt_oss": Architecture("GptOssForCausalLM", _gpt_oss, chosen=2, inputs_first=True),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", _deepseek_v3, chosen=4),
    "mixtral": Architecture("MixtralForCausalLM", _mixtral, chosen=2),
    "minimax_m2": Architecture("MiniMaxM2ForCausalLM", _minimax_m2, norms_queries=True, chosen=4),
    "qwen3_next": Architecture(
        "Qwen3NextForCausalLM", _qwen3_next, norm_offset=1.0, norms_queries=True, chosen=4
    ),
}

SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(
        hidden=256, layers=6, heads=4, kv_heads=2, intermediate=512, context=4096, sliding_window=64
    ),
    "small": Shape(hidden=768, layers=12, heads=12, kv_heads=4, intermediate=3072),
    # The layers of Qwen3-0.6B. The vocabulary is smaller: a proof uses no tokens and no head.
    "0.6b": Shape(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072, head_dim=128),
}
