"""What a verification of large models costs: ``python -m benchmarks.costs`` prints the table.

Nothing is measured or downloaded. Shapes are those of published configurations, and how fast
machines are is assumed, as ``docs/scale.md`` says.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proofserve.engines.reference.kernels import SERVED
from proofserve.engines.reference.suspects import FP8_CACHE, SUSPECTS, weight_bits
from proofserve.models.trained import CALIBRATIONS, DENSE
from proofserve.protocol import SEQ_LEN, SKETCH, TWINS
from proofserve.verifier.calibration_file import read
from proofserve.verifier.judges import OWN
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.plans.costs import (
    CostPlan,
    LayerSize,
    Rates,
    duration,
    expected_passes,
    layer_size,
)

# The options of ``verify`` by default, and a sample that excludes a forged tenth.
SAMPLE, FORWARD_BATCH, AT_ONCE = 128, 8, 32


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model's type and fields in transformers, and the bits in which its matrices are stored.

    ``of_experts`` are those of its experts, where they differ; scales included.
    """

    name: str
    kind: str
    fields: Mapping[str, Any]
    bits: float = 16.0
    of_experts: float | None = None

    def layers(self) -> list[LayerSize]:
        config = AutoConfig.for_model(self.kind, **self.fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return [self._size(each, config) for each in model.get_decoder().layers]

    def _size(self, layer: torch.nn.Module, config: Any) -> LayerSize:
        experts = sum(weight.numel() for weight in layer.parameters() if weight.ndim > 2)
        others = sum(weight.numel() for weight in layer.parameters()) - experts
        bits = others * self.bits + experts * (self.of_experts or self.bits)
        return layer_size(layer, config, round(bits / 8))


def _qwen(layers: int, hidden: int, heads: int, groups: int, **others: Any) -> dict[str, Any]:
    return {
        **{"num_hidden_layers": layers, "hidden_size": hidden, "head_dim": 128},
        **{"num_attention_heads": heads, "num_key_value_heads": groups, "vocab_size": 151936},
        **others,
    }


_OF_128: Final = {"num_experts": 128, "num_experts_per_tok": 8}
MODELS: Final = (
    PublishedModel("8B (Qwen3)", "qwen3", _qwen(36, 4096, 32, 8, intermediate_size=12288)),
    PublishedModel(
        "30B-A3B (Qwen3)", "qwen3_moe", _qwen(48, 2048, 32, 4, moe_intermediate_size=768, **_OF_128)
    ),
    PublishedModel("70B (Llama 3)", "llama", _qwen(80, 8192, 64, 8, intermediate_size=28672)),
    PublishedModel(
        "235B-A22B (Qwen3, FP8)",
        "qwen3_moe",
        _qwen(94, 4096, 64, 4, moe_intermediate_size=1536, **_OF_128),
        bits=8.0,
    ),
    PublishedModel(
        "1T-A32B (Kimi K2, INT4 experts)",
        "deepseek_v3",
        {
            **{"num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432},
            **{"moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8},
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
            **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536},
            **{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "vocab_size": 163840},
        },
        of_experts=4.5,
    ),
)


@dataclass(frozen=True, slots=True)
class AssumedMachine:
    """``room`` is the memory in which layers lie, in bytes."""

    name: str
    rates: Rates
    room: float


def _machine(
    name: str, room_gb: float, *, products: float, read: float, touched: float
) -> AssumedMachine:
    """``touched`` bytes a second: a number that is filled has 12, one of a suspect 100."""
    rates = Rates(products, 0.7 * products, read, touched / 12, touched / 100)
    return AssumedMachine(name, rates, room_gb * 1e9)


MACHINES: Final = (
    _machine("16 cores, 256 GB", 256, products=1.6e12, read=3e9, touched=1e11),
    _machine("a GPU of 24 GB", 24, products=4e13, read=3e9, touched=8e11),
    _machine("an H100 of 80 GB", 80, products=4e13, read=3e9, touched=2.5e12),
)


def planned(model: PublishedModel) -> CostPlan:
    """With the figures of the trained model's calibration, as if this model had the same."""
    bits = int(min(model.bits, model.of_experts or model.bits))
    names = [name for name in SUSPECTS if name == FP8_CACHE or weight_bits(name) < bits]
    layers = model.layers()
    calibration = read(Path(str(DENSE.files())) / CALIBRATIONS[SKETCH])
    options = JudgingOptions(threshold=calibration)
    passes = expected_passes(options, SAMPLE, (names, (str(OWN.kernels), *SERVED)), AT_ONCE)
    hidden = int(model.fields["hidden_size"])
    return CostPlan(layers, hidden, passes, "nonces", TWINS, SEQ_LEN, FORWARD_BATCH)


def rows() -> Iterator[str]:
    """The table of ``docs/scale.md``."""
    heads = ["model", "nonces, forwards", "a layer and its copy", "read", "PFLOP"]
    heads += [each.name for each in MACHINES]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for model in MODELS:
        plan = planned(model)
        runs = sum(plan.runs.values())
        cells = [
            model.name,
            f"{plan.nonces}, {runs}",
            f"{plan.layer_memory / 1e9:.1f} GB",
            f"{len(plan.passes)} x {plan.pass_bytes / 1e9:.0f} GB",
            f"{plan.all_operations / 1e15:,.0f}",
        ]
        yield f"| {' | '.join([*cells, *(_time(plan, each) for each in MACHINES)])} |"


def _time(plan: CostPlan, machine: AssumedMachine) -> str:
    if plan.layer_memory > 0.9 * machine.room:
        return "no room for a layer"
    parts = plan.seconds(machine.rates)
    return f"{duration(sum(parts.values()))}, of it {duration(parts['reading'])} reading"


if __name__ == "__main__":
    sys.stdout.writelines(f"{row}\n" for row in rows())
