"""The training itself: AdamW over windows of text, one pass of the learning rate up and down."""

import math
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

from proofserve.models.tokenizer import BOS, EOS_IDS, PAD, SPECIALS, VOCABULARY
from training.data import Data, batches

SEED: Final = 0
WINDOW: Final = 256
WINDOWS_PER_STEP: Final = 24
WARMUP_STEPS: Final = 60
PEAK_RATE: Final = 4e-3
LAST_SHARE: Final = 0.02
"""The last step's learning rate, as a share of the peak."""


def new_model() -> Qwen3ForCausalLM:
    """The model before training: 3.5 million parameters, even counts for two ranks or stages."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=list(EOS_IDS),
        pad_token_id=SPECIALS.index(PAD),
    )
    return Qwen3ForCausalLM(config).float()


def train(model: Qwen3ForCausalLM, data: Data, steps: int, report: Callable[[str], None]) -> None:
    """Train ``model`` in place. ``report`` gets a line every 25 steps.

    The same processor, versions and number of threads give the same weights, bit by bit.
    """
    model.train()
    optimizer = _optimizer(model)
    began = time.monotonic()
    source = batches(data.train, WINDOW, WINDOWS_PER_STEP, SEED)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * _share(step, steps)
        loss = _loss(model, next(source))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - began
            report(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {seconds:.0f} s")


def nats_per_byte(model: Qwen3ForCausalLM, data: Data) -> float:
    """The loss on the texts that were not trained on, in nats for each byte of them."""
    model.eval()
    windows = data.held_out[: (len(data.held_out) - 1) // WINDOW * WINDOW + 1].unfold(
        0, WINDOW + 1, WINDOW
    )
    with torch.no_grad():
        losses = [_loss(model, rows).item() * len(rows) for rows in torch.split(windows, 16)]
    tokens_per_byte = len(data.held_out) / data.held_out_bytes
    return sum(losses) / len(windows) * tokens_per_byte


def _loss(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def _share(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * progress)) / 2
