"""One proof forward on one rank: draw the inputs, run the deployed model, finish the scheme.

Chat never runs while a context of this module is open, so chat needs no flag that switches the
hooks off.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch

from proofserve.engines.vllm import compat_worker
from proofserve.engines.vllm.core_messages import Forward, proved
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import AllowedTokens, BlockScheme, ModelFacts
from proofserve.protocol.schemes import from_wire


def prove(worker: Any, forward: Forward) -> dict[str, Any] | None:
    """Run ``forward`` on this rank; one rank returns the values, the others return None.

    The reply lists the nonces whose row was not finite; their rows are left out.
    """
    runner, call = worker.model_runner, forward.call
    if not hasattr(worker, "proofserve_block"):
        # The tensors of recent blocks: some are large and take a second to draw.
        worker.proofserve_block = lru_cache(maxsize=4)(
            lambda scheme, *bound_to: from_wire(dict(scheme)).for_block(*bound_to)
        )
    # A message that crossed processes has lists where ranges were tuples.
    ranges = tuple((first, end) for first, end in call.token_ranges)
    tokens = AllowedTokens(ranges) if ranges else None
    facts = ModelFacts(runner.model_config.get_hidden_size(), call.weights_digest, tokens)
    of_block = Block(call.block_hash, call.block_height)
    compat_worker.require_plain_inputs(runner)
    with compat_worker.step_stream(runner):
        device, scheme = torch.device(runner.device), tuple(sorted(call.scheme.items()))
        block = worker.proofserve_block(scheme, of_block, facts, device)
        values = run_forward(runner, block, forward)
        if values is None:
            return None
        finite = torch.isfinite(values).all(dim=1)
        failed = [n for n, good in zip(call.nonces, finite.tolist(), strict=True) if not good]
        return proved(values[finite].cpu().numpy(), failed, len(call.nonces))


@torch.inference_mode()
def run_forward(runner: Any, block: BlockScheme, forward: Forward) -> torch.Tensor | None:
    """Values of every nonce of ``forward``, float32 [n, width].

    None on a rank without them, and for a part that is not the last: its hidden states wait in the
    runner. The last part of a model that cannot pause runs all layers. Collective: every rank must
    run the same forward. Keys and values go only into the blocks that ``forward`` names.
    """
    call, seq_len, n = forward.call, forward.call.seq_len, forward.sequences
    model, device = runner.get_model(), torch.device(runner.device)
    is_part = forward.first > 0 or not forward.is_last
    pauses = is_part and compat_worker.can_pause(model, forward.layers)
    if not (pauses or forward.is_last):
        return None
    positions = torch.arange(seq_len, device=device).repeat(n)
    metadata, slots = _attention(runner, forward, positions)
    compat_worker.without_adapters(runner, n, positions.numel())
    if pauses and forward.first:
        received, mixtures = runner.proofserve_halfway
    else:
        received, mixtures = compat_worker.receive_stage(), 0
    inputs = {"positions": positions, "intermediate_tensors": received}
    if received is None:
        # The prompts of all sequences, one after the other: token ids or embeddings.
        dtype = runner.model_config.dtype
        drawn = block.inputs(call.public_key, call.nonces, seq_len, dtype).flatten(0, 1)
        inputs["inputs_embeds" if drawn.is_floating_point() else "input_ids"] = drawn
    narrowed = (
        nullcontext() if block.reads_every_position else published_rows_only(model, n, seq_len)
    )
    part = compat_worker.some_layers(model, forward) if pauses else nullcontext()
    with _changed_by(block, model, positions, seq_len), narrowed, part:
        output, mixtures = compat_worker.call_model(runner, metadata, slots, inputs, mixtures)
    runner.proofserve_halfway = None
    if pauses and not forward.is_last:
        runner.proofserve_halfway = output, mixtures
        if device.type != "cpu":
            # A step of chat must not wait for it.
            torch.accelerator.synchronize(device)
        return None
    if (hidden := compat_worker.send_stage(output)) is None:
        return None
    states = hidden.view(n, seq_len, -1)
    read = states if block.reads_every_position else states[:, -1]
    return block.finish(call.public_key, call.nonces, read)


def _attention(
    runner: Any, forward: Forward, positions: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Attention metadata and slot mapping by layer, addressing only the leased blocks."""
    n, seq_len = forward.sequences, forward.call.seq_len
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
def _changed_by(
    block: BlockScheme, model: torch.nn.Module, positions: torch.Tensor, seq_len: int
) -> Iterator[None]:
    """For one forward: the scheme's transforms of layers, and the experts that the block chooses.

    ``positions`` int64 [tokens].
    """

    def transformed(index: int, _layer: torch.nn.Module, _args: Any, output: Any) -> Any:
        return block.layer_transform(index, output)

    with ExitStack() as hooks:
        if block.uses_layer_transforms:
            for index, layer in compat_worker.decoder_layers(model):
                hooks.enter_context(layer.register_forward_hook(partial(transformed, index)))
        if block.chooses_experts:
            for index, router in compat_worker.routers(model):
                ids = block.experts(index, compat_worker.expert_layer(router), seq_len)[positions]
                hooks.enter_context(compat_worker.with_experts(router, ids))
        yield


@contextmanager
def published_rows_only(model: torch.nn.Module, sequences: int, seq_len: int) -> Iterator[None]:
    """Within the context, the last MLP computes one row per sequence, and zeros for the others.

    For schemes that publish the last position of each sequence alone: after the last attention
    nothing mixes positions, so the published numbers are the same (ADR 8). Rows are
    ``sequences * seq_len`` tokens, one sequence after the other. A model whose last layer is not on
    this rank, has no ``mlp``, or has a mixture of experts there, is left as it is.
    """
    mlp = compat_worker.last_mlp(model)
    rows = sequences * seq_len
    if mlp is None or seq_len == 1:
        yield
        return

    def narrow(_mlp: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args or args[0].shape[0] != rows:
            return args
        return (args[0].view(sequences, seq_len, -1)[:, -1].contiguous(), *args[1:])

    def widen(_mlp: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[0] != sequences:
            return output
        full = output.new_zeros(rows, output.shape[-1])
        full.view(sequences, seq_len, -1)[:, -1] = output
        return full

    with mlp.register_forward_pre_hook(narrow), mlp.register_forward_hook(widen):
        yield
