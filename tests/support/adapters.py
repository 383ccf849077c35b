"""A LoRA adapter for the tiny checkpoint, and the same weights merged into the reference."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from proofserve.engines.reference.network import Network

RANK = 8
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def write_adapter(folder: Path, network: Network) -> Pairs:
    """Write an adapter of each layer's o_proj; returns A [rank, in] and B [out, rank] by layer."""
    drawn = torch.Generator().manual_seed(0)
    pairs: Pairs = []
    tensors = {}
    for index, layer in enumerate(network.shapes):
        out, into = layer.get_parameter("self_attn.o_proj.weight").shape
        a = torch.randn(RANK, into, generator=drawn) / into**0.5
        b = torch.randn(out, RANK, generator=drawn) * 0.3
        name = f"base_model.model.model.layers.{index}.self_attn.o_proj"
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        pairs.append((a, b))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK,
        "target_modules": ["o_proj"], "bias": "none",
    }  # fmt: skip
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return pairs


def merged(network: Network, pairs: Pairs) -> Network:
    def changed(index: int, layer: nn.Module) -> nn.Module:
        a, b = pairs[index]
        projection = layer.get_submodule("self_attn.o_proj")
        weight = projection.get_parameter("weight")
        projection.weight = nn.Parameter(weight + b @ a, requires_grad=False)
        return layer

    return network.changed(changed)
