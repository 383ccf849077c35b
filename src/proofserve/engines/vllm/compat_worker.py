"""vLLM's private names in its workers: attention metadata, the model call, ranks, layers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata

from proofserve.engines.vllm.support import UnsupportedEngine

# Where models keep their decoder layers; the first three as in protocol A.3.
LAYER_PLACES = (
    "model.layers",
    "transformer.h",
    "layers",
    "language_model.model.layers",
    "model.language_model.layers",
)


def attention_metadata(runner: Any, common: Sequence[Any]) -> dict[str, Any]:
    """Per-layer attention metadata from one CommonAttentionMetadata for each KV-cache group.

    Relies on: GPUModelRunner.attn_groups[group][i].build_metadata and .layer_names.
    """
    layers: dict[str, Any] = {}
    for gid, groups in enumerate(runner.attn_groups):
        for group in groups:
            metadata = group.build_metadata(common[gid])
            layers.update(dict.fromkeys(group.layer_names, metadata))
    return layers


def common_metadata(
    starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor
) -> Any:
    """Metadata of a batch of n equal, fresh sequences for one KV-cache group.

    Args:
        starts: int32 [n + 1], where each sequence starts among the tokens, on the CPU.
        positions: int64 [n * seq_len] on the device.
        table: int32 [n, blocks per sequence] on the device.
        slots: int64 [n * seq_len] on the device.

    Relies on: vllm.v1.attention.backend.CommonAttentionMetadata.
    """
    device, n = positions.device, starts.numel() - 1
    seq_len = positions.numel() // n
    lengths = torch.full((n,), seq_len, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(device),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=n,
        num_actual_tokens=n * seq_len,
        max_query_len=seq_len,
        max_seq_len=seq_len,
        block_table_tensor=table,
        slot_mapping=slots,
        causal=True,
        is_prefilling=torch.ones(n, dtype=torch.bool),
        positions=positions,
    )


def group_layer_names(runner: Any) -> list[list[str]]:
    return [list(group.layer_names) for group in runner.kv_cache_config.kv_cache_groups]


def call_model(runner: Any, metadata: dict[str, Any], slots: dict[str, Any], inputs: Any) -> Any:
    """Run the deployed model once, eagerly, and return what its forward returns.

    ``inputs`` holds ``positions``, ``intermediate_tensors``, and on the first pipeline rank
    ``input_ids`` or ``inputs_embeds``. Compiled graphs are skipped: they replay chat's buffers.

    Relies on: set_forward_context(skip_compiled), GPUModelRunner._model_forward,
    .use_aux_hidden_state_outputs, .uses_mrope.
    """
    positions = inputs["positions"]
    if runner.uses_mrope:
        positions = positions.expand(3, -1)
    with set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=inputs["positions"].numel(),
        slot_mapping=slots,
        skip_compiled=True,
    ):
        output = runner._model_forward(**{"input_ids": None, **inputs, "positions": positions})
    return output[0] if runner.use_aux_hidden_state_outputs else output


def receive_stage() -> Any:
    """Tensors from the previous pipeline rank, or None on the first.

    Relies on: get_pp_group().recv_tensor_dict, IntermediateTensors.
    """
    if get_pp_group().is_first_rank:
        return None
    return IntermediateTensors(get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group()))


def send_stage(output: Any) -> torch.Tensor | None:
    """Hand ``output`` to the next pipeline rank; its hidden rows on the rank that answers.

    Of the last pipeline rank's tensor-parallel group the first rank answers, for all of them.
    Relies on: send_tensor_dict.
    """
    if not get_pp_group().is_last_rank:
        get_pp_group().send_tensor_dict(output.tensors, all_gather_group=get_tp_group())
        return None
    if not get_tp_group().is_first_rank:
        return None
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def last_mlp(model: torch.nn.Module) -> torch.nn.Module | None:
    """The dense MLP of the last decoder layer, None where there is none on this rank.

    Relies on: decoder layers calling ``self.mlp(hidden)``; a mixture of experts having ``experts``.
    """
    layers = _layer_list(model)
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    if not isinstance(mlp, torch.nn.Module) or hasattr(mlp, "experts"):
        return None
    return mlp


def decoder_layers(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """The decoder layers with their global index (protocol A.3, and wrapped language models).

    A pipeline rank's list keeps a placeholder for layers that live elsewhere, so positions in
    the list are global. Raises UnsupportedEngine if the model keeps its layers in no known place.
    """
    layers = _layer_list(model)
    if layers is None:
        raise UnsupportedEngine(
            f"{type(model).__name__} keeps its decoder layers in none of "
            f"{', '.join(LAYER_PLACES)}; schemes with layer transforms cannot be proved on it."
        )
    return enumerate(layers)


def _layer_list(model: torch.nn.Module) -> torch.nn.ModuleList | None:
    for place in LAYER_PLACES:
        found: Any = model
        for name in place.split("."):
            found = getattr(found, name, None)
        if isinstance(found, torch.nn.ModuleList):
            return found
    return None
