"""What a verdict by weights costs: ``python -m benchmarks.costs`` prints the validator's table.

Nothing is measured or downloaded. Shapes are those of published configurations. How fast machines
are is assumed, as ``docs/validator.md`` says; two cores are as fast as ``--plan`` found them.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from measuring.results import table, table_rows
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
    """What ``costs.toml`` says of a model."""

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


@dataclass(frozen=True, slots=True)
class AssumedMachine:
    name: str
    room_gb: float
    products: float
    read: float
    touched: float

    @property
    def rates(self) -> Rates:
        filled, of_suspect = self.touched / 12, self.touched / 100
        return Rates(self.products, 0.7 * self.products, self.read, filled, of_suspect)


_TABLE: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODELS: Final = tuple(PublishedModel(**row) for row in _TABLE["model"])
MACHINES: Final = tuple(AssumedMachine(**row) for row in _TABLE["machine"])


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
    yield from table(heads, []).splitlines()
    for model in MODELS:
        plans = planned(model)
        memory = IN_USE + max(each.layer_memory + each.state_memory for each in plans)
        sizes = (f"{size / 1e9:.{int(size < 1e10)}f} GB" for size in (plans[0].pass_bytes, memory))
        cells = [model.name, *sizes, *(_times(plans, memory, each) for each in MACHINES)]
        yield table_rows([cells])


def _times(plans: tuple[CostPlan, CostPlan], memory: float, machine: AssumedMachine) -> str:
    if memory > 0.9e9 * machine.room_gb:
        return "no room"
    return "; ".join(duration(sum(each.seconds(machine.rates).values())) for each in plans)


if __name__ == "__main__":
    sys.stdout.writelines(f"{row}\n" for row in rows())
