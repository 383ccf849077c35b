"""One proof forward on one rank: draw the inputs, run the deployed model, finish the scheme."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch

from proofserve.engines.vllm import compat_worker
from proofserve.engines.vllm.core_messages import Forward, proved
from proofserve.engines.vllm.last_layer import published_rows_only
from proofserve.protocol.scheme import BlockScheme
from proofserve.protocol.schemes import from_wire


def prove(worker: Any, forward: Forward) -> dict[str, Any] | None:
    """Run ``forward`` on this rank; one rank returns the values, the others return None.

    The reply lists the nonces whose row was not finite; their rows are left out.
    """
    runner, call = worker.model_runner, forward.call
    if not hasattr(worker, "proofserve_block"):
        # The tensors of recent blocks: some are large and take a second to draw.
        worker.proofserve_block = lru_cache(maxsize=4)(_block_scheme)
    size, device = runner.model_config.get_hidden_size(), torch.device(runner.device)
    scheme = tuple(sorted(call.scheme.items()))
    block = worker.proofserve_block(scheme, call.block_hash, size, device)
    values = run_forward(runner, block, forward)
    if values is None:
        return None
    finite = torch.isfinite(values).all(dim=1)
    failed = [n for n, good in zip(call.nonces, finite.tolist(), strict=True) if not good]
    return proved(values[finite].cpu().numpy(), failed, len(call.nonces))


def _block_scheme(
    scheme: tuple[tuple[str, Any], ...], block_hash: str, hidden_size: int, device: torch.device
) -> BlockScheme:
    return from_wire(dict(scheme)).for_block(block_hash, hidden_size, device)


@torch.inference_mode()
def run_forward(runner: Any, block: BlockScheme, forward: Forward) -> torch.Tensor | None:
    """Values of every nonce of ``forward``, float32 [n, width], or None on a rank without them.

    Collective: every rank must run the same forward. Keys and values go only into the blocks
    that ``forward`` names.
    """
    call, seq_len, n = forward.call, forward.call.seq_len, len(forward.call.nonces)
    positions = torch.arange(seq_len, device=torch.device(runner.device)).repeat(n)
    metadata, slots = _attention(runner, forward, positions)
    received, embeds = compat_worker.receive_stage(), None
    if received is None:
        embeds = block.inputs(call.public_key, call.nonces, seq_len, runner.model_config.dtype)
        embeds = embeds.view(n * seq_len, -1)
    inputs = {"positions": positions, "intermediate_tensors": received, "inputs_embeds": embeds}
    model = runner.get_model()
    with _layer_transforms(model, block), published_rows_only(model, n, seq_len):
        output = compat_worker.call_model(runner, metadata, slots, inputs)
    hidden = compat_worker.send_stage(output)
    if hidden is None:
        return None
    last = hidden.view(n, seq_len, -1)[:, -1]
    return block.finish(call.public_key, call.nonces, last)


def _attention(
    runner: Any, forward: Forward, positions: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Attention metadata and slot mapping by layer, addressing only the leased blocks."""
    n, seq_len = len(forward.call.nonces), forward.call.seq_len
    starts = torch.arange(0, (n + 1) * seq_len, seq_len, dtype=torch.int32)
    common = []
    slots: dict[str, torch.Tensor] = {}
    for gid, names in enumerate(compat_worker.group_layer_names(runner)):
        table = torch.tensor(forward.blocks[gid], dtype=torch.int32, device=positions.device)
        size = forward.block_sizes[gid]
        token = positions[:seq_len]
        group_slots = (table.long()[:, token // size] * size + token % size).flatten()
        common.append(compat_worker.common_metadata(starts, positions, table, group_slots))
        slots.update(dict.fromkeys(names, group_slots))
    return compat_worker.attention_metadata(runner, common), slots


@contextmanager
def _layer_transforms(model: torch.nn.Module, block: BlockScheme) -> Iterator[None]:
    """Hook the scheme's transforms onto the decoder layers for the length of one forward.

    Chat never runs inside this context, so chat needs no flag that switches the hooks off.
    """
    with ExitStack() as hooks:
        if block.uses_layer_transforms:
            for index, layer in compat_worker.decoder_layers(model):
                hook = partial(_transform, block, index)
                hooks.enter_context(layer.register_forward_hook(hook))
        yield


def _transform(
    block: BlockScheme, index: int, _layer: torch.nn.Module, _args: Any, output: Any
) -> Any:
    return block.layer_transform(index, output)
