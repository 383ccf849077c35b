"""The training itself: windows of text, then of chats; the learning rate rises once and falls."""

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
WINDOWS_PER_STEP: Final = 12
WARMUP_STEPS: Final = 30
TEXT_SHARE: Final = 0.75
"""The share of the steps that read all texts; the last ones read chats alone."""
PEAK_RATE: Final = 3e-3
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
    optimizers = _optimizers(model)
    began = time.monotonic()
    texts = batches(data.train, WINDOW, WINDOWS_PER_STEP, SEED)
    chats = batches(data.chats, WINDOW, WINDOWS_PER_STEP, SEED)
    for step in range(steps):
        loss = _loss(model, next(texts if step < TEXT_SHARE * steps else chats))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * _share(step, steps)
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
    # Weights and sums stay in float32; products in bfloat16 take half the time on processors with
    # matrix units.
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def _optimizers(model: Qwen3ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, which learn in about half the steps of AdamW; AdamW beside.

    The step of Muon is scaled to AdamW's, so that one learning rate suits both.
    """
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in layers}
    others = [p for p in model.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(
        layers, lr=PEAK_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def _share(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * progress)) / 2
