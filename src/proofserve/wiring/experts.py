"""Which kernel for experts a server asks vLLM for, so that sketch-v2 can be proved on a card."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from proofserve.host import card_capability
from proofserve.protocol import SKETCH_2
from proofserve.wiring.launch import of_vllm

# Of cards: sm80 to sm89, sm90, sm100 to sm103.
CAPABILITIES: Final = (8, 9, 10)
OPTION: Final = "--moe-backend"
# How configurations name the number of experts.
_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


# From which major capability on the kernel that vLLM takes by itself chooses experts, and the value
# of ``OPTION`` with which vLLM's router chooses; a block cannot choose for a kernel. Of vLLM 0.26
# to 0.33 on one rank of experts, with every optional kernel installed. ``tests/contract`` has vLLM
# choose for each row; no card has run it.
FORMATS: Final[Mapping[str, tuple[int, str]]] = {
    "bfloat16": (10, "triton"),
    "fp8": (10, "triton"),
    "mxfp4": (9, "marlin"),
    "int4": (10, "marlin"),
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
    if method in ("awq", "gptq"):
        return "int4" if said.get("bits") == 4 else None
    if method == "compressed-tensors":
        groups = (said.get("config_groups") or {}).values()
        kinds = {(w.get("type"), w.get("num_bits")) for w in (g["weights"] for g in groups)}
        if len(kinds) == 1:
            return {("int", 4): "int4", ("float", 8): "fp8"}.get(kinds.pop())
    return None


@dataclass(frozen=True, slots=True)
class Asked:
    """Options of vLLM, none where it keeps its own choice, and why."""

    options: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return f"{' '.join(self.options) or 'as vLLM chooses'}: {self.why}"


def asked_experts(
    model: str, vllm_options: Sequence[str], scheme: str | None, capability: str | None = None
) -> Asked:
    """What a server asks for that proves ``scheme``, any if that is empty.

    ``capability`` is the card's, such as 9.0; unset, that of this machine's first card.

    Raises ValueError for one that is no capability.
    """
    if scheme and scheme != SKETCH_2:
        return Asked((), f"{scheme} leaves the experts to the model")
    config = config_of(model)
    if config is None:
        return Asked((), f"no config.json of {model} is on this machine")
    if not has_experts(config):
        return Asked((), "the model has none")
    options = of_vllm(vllm_options)
    if options.moe_backend or options.kernel_config or options.config:
        return Asked((), "the operator's options decide")
    card = capability or card_capability()
    if card is None:
        return Asked((), "no card is here")
    return _by_table(card, None if options.quantization else expert_format(config))


def _by_table(card: str, kind: str | None) -> Asked:
    found = re.fullmatch(r"(\d+)\.\d", card)
    if found is None:
        raise ValueError(f"{card!r} is no capability of a card; an H100 has 9.0")
    row, major = FORMATS.get(kind or ""), int(found[1])
    if row is None or major not in CAPABILITIES:
        named = "this format of weights" if row is None else f"cards of capability {card}"
        return Asked((), f"the table does not know {named}; {OPTION} chooses")
    fused_from, unfused = row
    if major < fused_from:
        return Asked((), f"with {kind} on a card of {card} the router chooses experts")
    why = f"vLLM's own choice for {kind} on a card of {card} would choose experts in a kernel"
    return Asked((OPTION, unfused), f"{why}, and {SKETCH_2} be refused")


def config_of(model: str) -> Mapping[str, Any] | None:
    """``config.json`` of a folder, or of a model in the cache; None if it is not there."""
    file = Path(model) / "config.json"
    if not file.is_file():
        # Light, and a part of vLLM's own requirements.
        from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415
        from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

        try:
            cached = try_to_load_from_cache(model, "config.json")
        except HFValidationError:
            return None
        if not isinstance(cached, str):
            return None
        file = Path(cached)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
