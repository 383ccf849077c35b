"""What a verdict by weights costs: ``python -m benchmarks.costs`` prints the validator's table.

Nothing is measured or downloaded. Shapes are those of published configurations. How fast machines
are is assumed, as ``docs/validator.md`` says; two cores are as fast as ``--plan`` found them.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proofserve.engines.reference.kernels import PROFILES, SERVED
from proofserve.engines.reference.suspects import FP8_CACHE, SUSPECTS, weight_bits
from proofserve.models.trained import CALIBRATIONS, DENSE
from proofserve.protocol import SEQ_LEN, SKETCH, TWINS
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve.verifier.judges import OWN
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.noise import MeasuringPlan
from proofserve.verifier.plans import (
    CostPlan,
    LayerSize,
    Rates,
    duration,
    expected_passes,
    layer_size,
    measuring_passes,
)

# The options of ``verify`` by default, and a sample that excludes a forged tenth.
SAMPLE, FORWARD_BATCH, AT_ONCE = 128, 8, 32
# Of a calibration, by default.
MEASURED: Final = MeasuringPlan(tuple(range(32)), emulated=16, bank=24)
# Bytes that a process has before it reads a layer, as ``--plan`` says.
IN_USE: Final = 0.8e9


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
    PublishedModel(
        "0.1B (SmolLM2)",
        "llama",
        {
            **{"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536},
            **{"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152},
        },
    ),
    PublishedModel("8B (Qwen3)", "qwen3", _qwen(36, 4096, 32, 8, intermediate_size=12288)),
    PublishedModel(
        "30B-A3B (Qwen3)", "qwen3_moe", _qwen(48, 2048, 32, 4, moe_intermediate_size=768, **_OF_128)
    ),
    # The defaults of its class are this model's.
    PublishedModel("120B (gpt-oss, MXFP4)", "gpt_oss", {"hidden_size": 2880}, of_experts=4.25),
    PublishedModel(
        "235B-A22B (Qwen3, FP8)",
        "qwen3_moe",
        _qwen(94, 4096, 64, 4, moe_intermediate_size=1536, **_OF_128),
        bits=8.0,
    ),
    PublishedModel(
        "1T-A32B (Kimi K2, INT4)",
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
    _machine("laptop, 16 GB", 16, products=8.5e10, read=8e8, touched=2e10),
    _machine("16 cores, 256 GB", 256, products=1.6e12, read=3e9, touched=1e11),
    _machine("a GPU of 80 GB", 80, products=4e13, read=3e9, touched=2.5e12),
)


def planned(model: PublishedModel) -> tuple[CostPlan, CostPlan]:
    """A verdict and a calibration.

    The verdict has the figures of the trained model's calibration, as if this model had the same.
    """
    bits = int(min(model.bits, model.of_experts or model.bits))
    names = [name for name in SUSPECTS if name == FP8_CACHE or weight_bits(name) < bits]
    references = (str(OWN.kernels), *SERVED)
    kept = CalibrationFile.read(Path(str(DENSE.files())) / CALIBRATIONS[SKETCH])
    options = JudgingOptions(threshold=kept)
    verdict = expected_passes(options, SAMPLE, (names, references), AT_ONCE)
    calibration = measuring_passes(MEASURED, (names, tuple(PROFILES), references))
    layers, hidden = model.layers(), int(model.fields["hidden_size"])
    of_verdict, of_calibration = (
        CostPlan(layers, hidden, passes, "nonces", TWINS, SEQ_LEN, FORWARD_BATCH)
        for passes in (verdict, calibration)
    )
    return of_verdict, of_calibration


def rows() -> Iterator[str]:
    """The table of ``docs/validator.md``."""
    heads = ["model", "layers on disk", "memory", *(each.name for each in MACHINES)]
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for model in MODELS:
        plans = planned(model)
        memory = IN_USE + max(each.layer_memory + each.state_memory for each in plans)
        sizes = (f"{size / 1e9:.{int(size < 1e10)}f} GB" for size in (plans[0].pass_bytes, memory))
        cells = [model.name, *sizes, *(_times(plans, memory, each) for each in MACHINES)]
        yield f"| {' | '.join(cells)} |"


def _times(plans: tuple[CostPlan, CostPlan], memory: float, machine: AssumedMachine) -> str:
    if memory > 0.9 * machine.room:
        return "no room"
    return "; ".join(duration(sum(each.seconds(machine.rates).values())) for each in plans)


if __name__ == "__main__":
    sys.stdout.writelines(f"{row}\n" for row in rows())
