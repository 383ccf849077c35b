"""Which kernel for experts a server asks vLLM for, so that sketch-v2 can be proved on a card."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proofserve.engines.vetting.experts import (
    CAPABILITIES,
    FORMATS,
    OPTION,
    expert_format,
    has_experts,
)
from proofserve.lab.host import card_capability
from proofserve.protocol import SKETCH_2
from proofserve.wiring.launch import of_vllm


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
    config = _config_of(model)
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
    if major < row.fused_from:
        return Asked((), f"with {kind} on a card of {card} the router chooses experts")
    why = f"vLLM's own choice for {kind} on a card of {card} would choose experts in a kernel"
    return Asked((OPTION, row.unfused), f"{why}, and {SKETCH_2} be refused")


def _config_of(model: str) -> Mapping[str, Any] | None:
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
