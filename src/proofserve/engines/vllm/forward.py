"""One proof forward on one rank: draw the inputs, run the deployed model, finish the scheme."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from proofserve.engines.vllm import compat
from proofserve.engines.vllm.last_layer import published_rows_only
from proofserve.engines.vllm.wire import Forward
from proofserve.protocol.scheme import BlockScheme


@torch.inference_mode()
def run_forward(runner: Any, block: BlockScheme, forward: Forward) -> torch.Tensor | None:
    """Values of every nonce of ``forward``, float32 [n, width], or None on a rank without them.

    Collective: every rank must run the same forward. Keys and values go only into the blocks
    that ``forward`` names.
    """
    device = torch.device(runner.device)
    n, seq_len = len(forward.nonces), forward.seq_len
    positions = torch.arange(seq_len, device=device).repeat(n)
    metadata, slots = _attention(runner, forward, positions)
    embeds = None
    if compat.is_first_stage():
        dtype = runner.model_config.dtype
        embeds = block.inputs(forward.public_key, forward.nonces, seq_len, dtype)
        embeds = embeds.view(n * seq_len, -1)
    inputs = {
        "positions": positions,
        "intermediate_tensors": compat.receive_stage(),
        "inputs_embeds": embeds,
    }
    model = runner.get_model()
    with _layer_transforms(model, block), published_rows_only(model, n, seq_len):
        output = compat.call_model(runner, metadata, slots, inputs)
    if not compat.is_last_stage():
        compat.send_stage(output)
        return None
    if not compat.speaks_for_stage():
        return None
    hidden = output[0] if isinstance(output, tuple) else output
    last = hidden.view(n, seq_len, -1)[:, -1]
    return block.finish(forward.public_key, forward.nonces, last)


def _attention(
    runner: Any, forward: Forward, positions: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Attention metadata and slot mapping by layer, addressing only the leased blocks."""
    n, seq_len = len(forward.nonces), forward.seq_len
    starts = torch.arange(0, (n + 1) * seq_len, seq_len, dtype=torch.int32)
    common = []
    slots: dict[str, torch.Tensor] = {}
    for gid, names in enumerate(compat.group_layer_names(runner)):
        table = torch.tensor(forward.blocks[gid], dtype=torch.int32, device=positions.device)
        size = forward.block_sizes[gid]
        token = positions[:seq_len]
        group_slots = (table.long()[:, token // size] * size + token % size).flatten()
        common.append(
            compat.common_metadata(
                seq_len, starts, positions, {"block_table": table, "slots": group_slots}
            )
        )
        slots.update(dict.fromkeys(names, group_slots))
    return compat.attention_metadata(runner, common), slots


@contextmanager
def _layer_transforms(model: torch.nn.Module, block: BlockScheme) -> Iterator[None]:
    """Hook the scheme's transforms onto the decoder layers for the length of one forward.

    Chat never runs inside this context, so there is no flag to get wrong.
    """
    hooks = []
    if block.uses_layer_transforms:
        for index, layer in compat.decoder_layers(model):
            hooks.append(layer.register_forward_hook(_transform(block, index)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _transform(block: BlockScheme, index: int) -> Any:
    def hook(_layer: torch.nn.Module, _args: Any, output: Any) -> Any:
        return block.layer_transform(index, output)

    return hook
