"""Has vLLM choose the tokens that a request asks for, one after the other."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, process_dict_updates


class Scripted(LogitsProcessor):  # type: ignore[misc]
    """``vllm_xargs`` of a request has ``script``, the ids; other requests are left alone."""

    def __init__(self, *_about_the_engine: Any) -> None:
        # By row of the batch: the script, and what was chosen so far.
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        def new(params: Any, _prompt: Any, chosen: list[int]) -> tuple[list[int], list[int]] | None:
            script = (params.extra_args or {}).get("script")
            return (list(map(int, script)), chosen) if script else None

        process_dict_updates(self._rows, batch_update, new)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, chosen) in self._rows.items():
            if len(chosen) < len(script):
                logits[row] = -torch.inf
                logits[row, script[len(chosen)]] = 0.0
        return logits
