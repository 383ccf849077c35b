import pytest
import torch
from transformers import AutoModelForCausalLM

from proofserve.models.architectures import ARCHITECTURES, SHAPES

# Copied from CPUAttentionBackend.get_supported_head_sizes of vLLM 0.32.
CPU_HEAD_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


@pytest.mark.parametrize("size", SHAPES)
def test_shapes_split_over_two_ranks_and_two_stages(size: str) -> None:
    dimensions = SHAPES[size]
    assert dimensions.heads % 2 == 0
    assert dimensions.kv_heads % 2 == 0
    assert dimensions.heads % dimensions.kv_heads == 0
    assert dimensions.heads > dimensions.kv_heads
    assert dimensions.layers % 2 == 0
    assert dimensions.intermediate % 2 == 0
    assert dimensions.hidden % dimensions.heads == 0
    assert dimensions.head_dim in CPU_HEAD_SIZES
    assert dimensions.context >= 4096
    assert dimensions.sliding_window < 256


@pytest.mark.parametrize("arch", [n for n, each in ARCHITECTURES.items() if each.chosen == 1])
@pytest.mark.parametrize(
    ("size", "low", "high"), [("tiny", 1e6, 6e6), ("small", 90e6, 115e6), ("0.6b", 435e6, 450e6)]
)
def test_sizes_are_what_they_are_called(arch: str, size: str, low: float, high: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[arch].config(SHAPES[size]))
    assert type(model).__name__ == ARCHITECTURES[arch].class_name
    assert low < sum(p.numel() for p in model.parameters()) < high


@pytest.mark.parametrize("arch", [n for n, each in ARCHITECTURES.items() if each.chosen > 1])
def test_a_token_s_experts_are_together_no_wider_than_the_dense_model(arch: str) -> None:
    config = ARCHITECTURES[arch].config(SHAPES["tiny"])
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    assert config.num_experts_per_tok == ARCHITECTURES[arch].chosen
    assert width * config.num_experts_per_tok == SHAPES["tiny"].intermediate


@pytest.mark.parametrize("size", SHAPES)
def test_either_half_of_a_gemma_mixes_sliding_and_full_layers(size: str) -> None:
    kinds = ARCHITECTURES["gemma3"].config(SHAPES[size]).layer_types
    half = SHAPES[size].layers // 2
    for stage in (kinds[:half], kinds[half:]):
        assert set(stage) == {"sliding_attention", "full_attention"}


def test_the_largest_has_the_layers_of_qwen3_06b() -> None:
    # As published: 440M of its 596M parameters are no embeddings.
    config = ARCHITECTURES["qwen3"].config(SHAPES["0.6b"])
    published = (1024, 28, 16, 8, 128, 3072)
    assert published == (
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.intermediate_size,
    )
