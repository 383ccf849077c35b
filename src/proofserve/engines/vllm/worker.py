"""One proof forward on one rank: draw the inputs, run the deployed model, finish the scheme."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from proofserve.engines.vllm import compat_worker
from proofserve.engines.vllm.core_messages import Forward, proved
from proofserve.engines.vllm.last_layer import published_rows_only
from proofserve.protocol.scheme import BlockScheme
from proofserve.protocol.schemes import from_wire


class BlockCache:
    """Block-dependent parts of recent schemes; some are large and take a second to draw."""

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[object, str], BlockScheme] = OrderedDict()

    def get(self, forward: Forward, hidden_size: int, device: torch.device) -> BlockScheme:
        """The scheme of ``forward`` bound to its block, built once."""
        key = (tuple(sorted(forward.scheme.items())), forward.block_hash)
        block = self._blocks.pop(key, None)
        if block is None:
            scheme = from_wire(forward.scheme)
            block = scheme.for_block(forward.block_hash, hidden_size, device)
        self._blocks[key] = block
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return block


def prove(worker: Any, forward: Forward) -> dict[str, Any] | None:
    """Run ``forward`` on this rank; the rank that speaks for the output returns the values.

    The reply lists the nonces whose row was not finite; their rows are left out.
    """
    runner = worker.model_runner
    if not hasattr(worker, "proofserve_blocks"):
        worker.proofserve_blocks = BlockCache()
    hidden_size = runner.model_config.get_hidden_size()
    block = worker.proofserve_blocks.get(forward, hidden_size, torch.device(runner.device))
    values = run_forward(runner, block, forward)
    if values is None:
        return None
    finite = torch.isfinite(values).all(dim=1)
    failed = [n for n, good in zip(forward.nonces, finite.tolist(), strict=True) if not good]
    return proved(values[finite].cpu().numpy(), failed, len(forward.nonces))


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
    if compat_worker.is_first_stage():
        dtype = runner.model_config.dtype
        embeds = block.inputs(forward.public_key, forward.nonces, seq_len, dtype)
        embeds = embeds.view(n * seq_len, -1)
    inputs = {
        "positions": positions,
        "intermediate_tensors": compat_worker.receive_stage(),
        "inputs_embeds": embeds,
    }
    model = runner.get_model()
    with _layer_transforms(model, block), published_rows_only(model, n, seq_len):
        output = compat_worker.call_model(runner, metadata, slots, inputs)
    if not compat_worker.is_last_stage():
        compat_worker.send_stage(output)
        return None
    if not compat_worker.speaks_for_stage():
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
    for gid, names in enumerate(compat_worker.group_layer_names(runner)):
        table = torch.tensor(forward.blocks[gid], dtype=torch.int32, device=positions.device)
        size = forward.block_sizes[gid]
        token = positions[:seq_len]
        group_slots = (table.long()[:, token // size] * size + token % size).flatten()
        common.append(
            compat_worker.common_metadata(
                seq_len, starts, positions, {"block_table": table, "slots": group_slots}
            )
        )
        slots.update(dict.fromkeys(names, group_slots))
    return compat_worker.attention_metadata(runner, common), slots


@contextmanager
def _layer_transforms(model: torch.nn.Module, block: BlockScheme) -> Iterator[None]:
    """Hook the scheme's transforms onto the decoder layers for the length of one forward.

    Chat never runs inside this context, so chat needs no flag that switches the hooks off.
    """
    hooks = []
    if block.uses_layer_transforms:
        for index, layer in compat_worker.decoder_layers(model):
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
