"""Which of vLLM's kernels for experts choose the experts themselves, by card and format of weights.

A block cannot choose for such a kernel, so sketch-v2 is refused with it. The table is of vLLM 0.26
to 0.33 on one rank of experts, with every optional kernel installed; ``tests/contract`` has vLLM
choose for each row. No card has run it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

# Of cards: sm80 to sm89, sm90, sm100 to sm103.
CAPABILITIES: Final = (8, 9, 10)
OPTION: Final = "--moe-backend"
# How configurations name the number of experts.
_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
_FOUR_BITS: Final = frozenset({"awq", "gptq"})


@dataclass(frozen=True, slots=True)
class Experts:
    """The kernel that vLLM takes by itself chooses from the major capability ``fused_from`` on.

    ``unfused``: the value of ``OPTION`` with which vLLM's router chooses.
    """

    fused_from: int
    unfused: str


FORMATS: Final[Mapping[str, Experts]] = {
    "bfloat16": Experts(10, "triton"),
    "fp8": Experts(10, "triton"),
    "mxfp4": Experts(9, "marlin"),
    "int4": Experts(10, "marlin"),
}


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of a mixture."""
    inner = config.get("text_config") or config
    return any((inner.get(name) or 0) > 1 for name in _COUNTS)


def expert_format(config: Mapping[str, Any]) -> str | None:
    """The name in ``FORMATS`` of the experts' weights by ``config.json``; None for another one."""
    inner = config.get("text_config") or {}
    said = config.get("quantization_config") or inner.get("quantization_config")
    if said is None:
        return "bfloat16"
    method = said.get("quant_method")
    if method in ("fp8", "mxfp4"):
        return str(method)
    if method in _FOUR_BITS:
        return "int4" if said.get("bits") == 4 else None
    if method == "compressed-tensors":
        groups = (said.get("config_groups") or {}).values()
        kinds = {(w.get("type"), w.get("num_bits")) for w in (g["weights"] for g in groups)}
        if len(kinds) == 1:
            return {("int", 4): "int4", ("float", 8): "fp8"}.get(kinds.pop())
    return None
