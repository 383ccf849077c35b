"""A prover with no server at all: the checkpoint in plain transformers, on this machine's CPU.

What it computes is real, and by the same recipe; with another checkpoint it is the work of a node
that runs another model than it says.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from proofserve.lab.records import Work
from proofserve.protocol.codec import encode
from proofserve.protocol.comparison import Claim
from proofserve.protocol.schemes import scheme

DEVICE = torch.device("cpu")


@torch.inference_mode()
def claims_of_model(
    directory: Path, work: Work, nonces: Sequence[int], at_once: int = 8
) -> list[Claim]:
    """The artifacts (scheme ``artifact-v1``) that the checkpoint in ``directory`` gives."""
    model = _load(directory)
    recipe = scheme("artifact-v1", k_dim=work.k_dim)
    block = recipe.for_block(work.block_hash, model.config.hidden_size, DEVICE)
    texts: list[str] = []
    for start in range(0, len(nonces), at_once):
        part = nonces[start : start + at_once]
        inputs = block.inputs(work.public_key, part, work.seq_len, torch.bfloat16)
        hidden = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
        texts += encode(block.finish(work.public_key, part, hidden[:, -1]).numpy())
    return [Claim(nonce, text) for nonce, text in zip(nonces, texts, strict=True)]


def _load(directory: Path) -> Any:
    """The checkpoint without its head: tokens in, last hidden states out."""
    # Two seconds of imports that few commands need.
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    finally:
        if shown:
            logging.enable_progress_bar()
    return whole.eval().base_model
