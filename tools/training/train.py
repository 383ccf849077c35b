"""The training itself: windows of text, then of chats; the learning rate rises once and falls."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from training.data import Data, batches
from training.recipes import SEED, Recipe

WINDOW: Final = 256
WINDOWS_PER_STEP: Final = 12
WARMUP_STEPS: Final = 30
TEXT_SHARE: Final = 0.75
"""The share of the steps that read all texts; the last ones read chats alone."""
PEAK_RATE: Final = 3e-3
LAST_SHARE: Final = 0.02
"""The last step's learning rate, as a share of the peak."""


def train(
    model: PreTrainedModel, recipe: Recipe, data: Data, steps: int, report: Callable[[str], None]
) -> None:
    """Train ``model`` in place. ``report`` gets a line every 25 steps.

    The same processor, versions and number of threads give the same weights, bit by bit.
    """
    model.train()
    optimizers = _optimizers(model)
    began = time.monotonic()
    texts = batches(data.train, WINDOW, WINDOWS_PER_STEP, SEED)
    chats = batches(data.chats, WINDOW, WINDOWS_PER_STEP, SEED)
    for step in range(steps):
        rows = next(texts if step < TEXT_SHARE * steps else chats)
        # Weights and sums stay in float32.
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.half_products):
            loss, unequal = _losses(model, rows, balanced=recipe.balance > 0)
        torch.autograd.backward(loss + recipe.balance * unequal)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK_RATE * _share(step, steps)
            optimizer.step()
        model.zero_grad(set_to_none=False)
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - began
            report(
                f"step {step + 1} of {steps}: loss {loss.item():.3f}, of experts"
                f" {unequal.item():.3f}, {seconds:.0f} s"
            )


def nats_per_byte(model: PreTrainedModel, recipe: Recipe, data: Data) -> float:
    """The loss on the texts that were not trained on, in nats for each byte of them."""
    model.eval()
    windows = held_out_windows(data)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=recipe.half_products):
        losses = [
            _losses(model, rows, balanced=False)[0].item() * len(rows)
            for rows in torch.split(windows, 16)
        ]
    tokens_per_byte = len(data.held_out) / data.held_out_bytes
    return sum(losses) / len(windows) * tokens_per_byte


def expert_use(model: PreTrainedModel, data: Data) -> Tensor:
    """How often a token of the texts that were not trained on takes each expert.

    float32 [layers, experts]; 1 is an equal share.
    """
    model.eval()
    experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
    counts = torch.zeros(model.config.num_hidden_layers, experts)
    with torch.no_grad():
        for rows in torch.split(held_out_windows(data), 16):
            layers = model(input_ids=rows[:, :-1], output_router_logits=True).router_logits
            for layer, scores in enumerate(layers):
                counts[layer] += torch.bincount(
                    scores.topk(chosen).indices.flatten(), minlength=experts
                )
    return counts / counts.mean(dim=1, keepdim=True)


def held_out_windows(data: Data) -> Tensor:
    """int64 [windows, WINDOW + 1]; the last token of one is the first of the next."""
    return data.held_out[: (len(data.held_out) - 1) // WINDOW * WINDOW + 1].unfold(
        0, WINDOW + 1, WINDOW
    )


def _losses(model: PreTrainedModel, rows: Tensor, *, balanced: bool) -> tuple[Tensor, Tensor]:
    """The loss of the text, and if ``balanced`` that of experts which are unequally used."""
    options = {"output_router_logits": True} if balanced else {}
    output = model(input_ids=rows[:, :-1], **options)
    loss = cross_entropy(output.logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    if not balanced:
        return loss, torch.zeros(())
    return loss, unequal_use(output.router_logits, model.config.num_experts_per_tok)


def unequal_use(scores: Sequence[Tensor], chosen: int) -> Tensor:
    """How unequally tokens use experts, by their scores in each layer, [tokens, experts] each.

    ``chosen``, the experts of a token, if all are used equally, and more otherwise: the loss of
    the Switch Transformer (W. Fedus et al., 2021, equation 4), averaged over layers. The model's
    own sums the layers up first: an expert number that one layer forgets and another one prefers
    would cost nothing.
    """
    experts = scores[0].shape[-1]
    return torch.stack(
        [torch.as_tensor(load_balancing_loss_func((each,), experts, chosen)) for each in scores]
    ).mean()


def _optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, which learn in about half the steps of AdamW; AdamW beside.

    The step of Muon is scaled to AdamW's, so that one learning rate suits both.
    """
    layers = {name: p for name, p in model.model.layers.named_parameters() if p.ndim > 1}
    inside = {id(p) for p in layers.values()}
    others = [p for p in model.parameters() if id(p) not in inside]
    matrices = [matrix for name, p in layers.items() for matrix in _matrices(name, p)]
    muon = torch.optim.Muon(
        matrices, lr=PEAK_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return muon, torch.optim.AdamW(others, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def _matrices(name: str, parameter: Parameter) -> Iterator[Parameter]:
    """``parameter``, or the matrices of all its experts: parts of its memory and its gradient's."""
    if parameter.ndim == 2:
        yield parameter
        return
    parameter.grad = torch.zeros_like(parameter)
    # The gates of an expert lie above its up-projections.
    parts = 2 if name.endswith("gate_up_proj") else 1
    for values, slopes in zip(parameter.data, parameter.grad, strict=True):
        for value, slope in zip(values.chunk(parts), slopes.chunk(parts), strict=True):
            matrix = Parameter(value)
            matrix.grad = slope
            yield matrix


def _share(step: int, steps: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LAST_SHARE + (1 - LAST_SHARE) * (1 + math.cos(math.pi * progress)) / 2
