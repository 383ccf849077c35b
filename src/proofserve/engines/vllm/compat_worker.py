"""vLLM's private names in its workers: attention metadata, the model call, ranks, layers.

The names of a model runner that are used here are those that vLLM's two runners share. Proof
forwards read none of a runner's state of requests: not ``input_batch``, ``block_tables``,
``model_state`` or ``execute_model_state``.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import vllm.distributed.parallel_state
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.models.interfaces import supports_pp
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata

from proofserve.engines.vllm.core_messages import Forward
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.scheme import ExpertLayer

# Where models keep their decoder layers; the first three as in protocol A.3.
LAYER_PLACES = (
    "model.layers",
    "transformer.h",
    "layers",
    "language_model.model.layers",
    "model.language_model.layers",
)

# Routers that weigh the experts they chose by ``scoring_func``, ``renormalize`` and, where they
# have it, ``routed_scaling_factor``. A bias of theirs chooses experts and does not weigh them.
ROUTERS = frozenset({"CPURouter", "FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter"})


def attention_metadata(runner: Any, common: Sequence[Any]) -> dict[str, Any]:
    """Per-layer attention metadata from one CommonAttentionMetadata for each KV-cache group.

    ``common`` names blocks of the KV pool. Where a kernel wants smaller ones, the attention group
    expands each into the kernel's blocks, which have the same slots.

    Relies on: attn_groups[group][i].build_metadata and .layer_names of either runner;
    AttentionGroup._with_kernel_block_table. Until 0.31 on what ``_build_until_0_31`` names.
    """
    layers: dict[str, Any] = {}
    for gid, groups in enumerate(runner.attn_groups):
        for group in groups:
            if hasattr(group, "build_metadata"):
                metadata = group.build_metadata(common[gid])
            else:
                metadata = _build_until_0_31(group, runner._kernel_block_sizes[gid], common[gid])
            layers.update(dict.fromkeys(group.layer_names, metadata))
    return layers


def _build_until_0_31(group: Any, kernel_block_size: int, common: Any) -> Any:
    """Metadata of one attention group, whose builder expects the blocks of its kernels.

    A block of the KV pool is one or several of those. From 0.32 on the group maps them itself.

    Relies on: AttentionGroup.get_metadata_builder and .kv_cache_spec,
    AttentionMetadataBuilder.build, GPUModelRunner._kernel_block_sizes.
    """
    each = group.kv_cache_spec.block_size // kernel_block_size
    table = common.block_table_tensor
    within = torch.arange(each, dtype=table.dtype, device=table.device)
    mapped = (table.unsqueeze(-1) * each + within).flatten(1)
    builder = group.get_metadata_builder()
    return builder.build(0, replace(common, block_table_tensor=mapped))


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


def require_plain_inputs(runner: Any) -> None:
    """Raise UnsupportedEngine for a model whose forward takes more than tokens and positions.

    Every rank has the same model, so either all of them raise or none.

    Relies on: the second runner's model_state, a DefaultModelState for all other models.
    """
    state = type(getattr(runner, "model_state", None)).__name__
    if state not in {"NoneType", "DefaultModelState"}:
        raise UnsupportedEngine(
            f"{type(runner.get_model()).__name__} needs the inputs of a {state}; proofs are served "
            "for models that read tokens and positions alone."
        )


def step_stream(runner: Any) -> AbstractContextManager[Any]:
    """A context in which a GPU computes in the order of chat's steps.

    Blocks of the KV pool that a lease got may still be written by chat's last step, and the next
    step may get those that a lease returns. Copies of a step's tokens to the host run on other
    streams, and read tensors of their own.

    Relies on: the second runner's main_stream. The first one's steps, and calls from outside, run
    on the current stream of the worker's thread.
    """
    stream = getattr(runner, "main_stream", None)
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def call_model(
    runner: Any, metadata: dict[str, Any], slots: dict[str, Any], inputs: Any, mixtures: int = 0
) -> tuple[Any, int]:
    """Run the deployed model once, eagerly; what its forward returns, and how many mixtures ran.

    ``inputs`` holds ``positions``, ``intermediate_tensors``, and on the first pipeline rank
    ``input_ids`` or ``inputs_embeds``. Compiled graphs are skipped: they replay chat's buffers.
    ``mixtures`` of experts ran in earlier parts of this forward.

    Relies on: set_forward_context(skip_compiled); ForwardContext.moe_layer_index, by which some
    versions find the next mixture; model of either runner; ModelConfig.uses_mrope,
    .mrope_num_dims.
    """
    positions, config = inputs["positions"], runner.model_config
    if config.uses_mrope:
        # vLLM 0.29 has three for every model.
        positions = positions.expand(getattr(config, "mrope_num_dims", 3), -1)
    given = {"input_ids": None, "inputs_embeds": None, **inputs, "positions": positions}
    with set_forward_context(
        metadata,
        runner.vllm_config,
        num_tokens=inputs["positions"].numel(),
        slot_mapping=slots,
        skip_compiled=True,
    ):
        context: Any = get_forward_context()
        context.moe_layer_index = mixtures
        return runner.model(**given), context.moe_layer_index


class _Stage:
    """A pipeline group that says it is the first or the last stage, and is ``group`` otherwise."""

    def __init__(self, group: Any, is_first: bool, is_last: bool) -> None:
        self._group = group
        self.is_first_rank, self.is_last_rank = is_first, is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def can_pause(model: torch.nn.Module, layers: int) -> bool:
    """Whether ``model`` can run some of its ``layers`` alone.

    Relies on: supports_pp; the module that keeps the layers having start_layer and end_layer.
    """
    owner, found = _layer_owner(model)
    return supports_pp(model) and hasattr(owner, "start_layer") and len(found or ()) == layers


@contextmanager
def some_layers(model: torch.nn.Module, forward: Forward) -> Iterator[None]:
    """Within the context the model is the pipeline stage with the layers of ``forward`` alone.

    Steps of chat run outside of it. Relies on: models asking get_pp_group, which returns _PP of its
    module, whether to embed tokens and whether to return IntermediateTensors.
    """
    owner, group = _layer_owner(model)[0], get_pp_group()
    before = owner.start_layer, owner.end_layer
    stage: Any = _Stage(group, forward.first == 0, forward.is_last)
    owner.start_layer, owner.end_layer = forward.first, forward.end
    vllm.distributed.parallel_state._PP = stage
    try:
        yield
    finally:
        owner.start_layer, owner.end_layer = before
        vllm.distributed.parallel_state._PP = group


def without_adapters(runner: Any, sequences: int, tokens: int) -> None:
    """Have the next forward use no LoRA adapter, whichever the last step of chat used.

    Chat chooses its adapters anew in each step.

    Relies on: LoRAModelRunnerMixin._set_active_loras and lora_config of either runner.
    """
    if runner.lora_config is not None:
        runner._set_active_loras((0,) * sequences, (0,) * tokens, set())


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
    A model whose draft model reads inner layers returns those too, as the rest of a tuple.

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
    _, layers = _layer_owner(model)
    mlp = getattr(layers[-1], "mlp", None) if layers else None
    if not isinstance(mlp, torch.nn.Module) or hasattr(mlp, "experts"):
        return None
    return mlp


def decoder_layers(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """The decoder layers with their global index (protocol A.3, and wrapped language models).

    A pipeline rank's list keeps a placeholder for layers that live elsewhere, so positions in
    the list are global. Raises UnsupportedEngine if the model keeps its layers in no known place.
    """
    _, layers = _layer_owner(model)
    if layers is None:
        raise UnsupportedEngine(
            f"{type(model).__name__} keeps its decoder layers in none of "
            f"{', '.join(LAYER_PLACES)}; schemes with layer transforms cannot be proved on it."
        )
    return enumerate(layers)


def routers(model: torch.nn.Module) -> Iterator[tuple[int, Any]]:
    """The routers of a mixture with the global index of their layer, those of this rank.

    Raises UnsupportedEngine if a layer's experts have a router that is not known, or choose by
    themselves inside a kernel.

    Relies on: MoERunner.router and .is_monolithic (0.32; other versions are refused if they lack
    them); expert weights being [experts, ., .].
    """
    for index, layer in decoder_layers(model):
        # Some models call the matrix of the scores a router.
        with_router = (each for each in layer.modules() if hasattr(each, "router"))
        found: list[Any] = [each for each in with_router if hasattr(each.router, "select_experts")]
        for each in found:
            kind = type(each.router).__name__
            if getattr(each, "is_monolithic", True):
                unfused = "on a GPU --moe-backend triton, or marlin for experts of 4 bits, does not"
                raise _cannot_choose(f"{kind} of layer {index} chooses inside a kernel ({unfused})")
            if not _weighs_by_its_fields(each.router):
                raise _cannot_choose(f"{kind} of layer {index} weighs experts in its own way")
            yield index, each.router
        known = {id(weight) for each in found for weight in each.parameters()}
        matrices = (
            name for name, w in layer.named_parameters() if w.ndim > 2 and id(w) not in known
        )
        # Latent attention has a matrix for each head.
        if any("attn" not in name for name in matrices):
            raise _cannot_choose(f"layer {index} has experts without a known router")


def obstacle_to_seeded_experts(runner: Any) -> str | None:
    """Why a block cannot choose the experts of this rank's model; None if it can."""
    try:
        for _, router in routers(runner.get_model()):
            expert_layer(router)
    except (UnsupportedEngine, ProtocolError) as error:
        return str(error)
    return None


def _weighs_by_its_fields(router: Any) -> bool:
    return (
        type(router).__name__ in ROUTERS
        and router.scoring_func in {"softmax", "sigmoid"}
        and getattr(router, "custom_routing_function", None) is None
        and getattr(router, "_hash_indices_table", None) is None
        and not getattr(router, "num_fused_shared_experts", 0)
    )


def _cannot_choose(reason: str) -> UnsupportedEngine:
    return UnsupportedEngine(
        f"sketch-v2 cannot choose this model's experts: {reason}. Ask for sketch-v1 or artifact-v1."
    )


def expert_layer(router: Any) -> ExpertLayer:
    """Relies on: BaseRouter.top_k and .global_num_experts; the groups of its subclasses."""
    grouped = getattr(router, "use_grouped_topk", True)
    groups = (getattr(router, "num_expert_group", None) or 1) if grouped else 1
    chosen_groups = (getattr(router, "topk_group", None) or groups) if grouped else 1
    return ExpertLayer(router.global_num_experts, router.top_k, groups, chosen_groups)


@contextmanager
def with_experts(router: Any, ids: torch.Tensor) -> Iterator[None]:
    """While this is open, tokens have the experts ``ids`` [tokens, k], weighed by its own scores.

    Relies on: BaseRouter._compute_routing, which every router of ``ROUTERS`` has, and the fields by
    which it weighs.
    """

    def chosen(_states: Any, logits: torch.Tensor, kind: torch.dtype | None, **_: Any) -> Any:
        scores = logits.float()
        scored = scores.sigmoid() if router.scoring_func == "sigmoid" else scores.softmax(dim=-1)
        weights = scored.gather(1, ids)
        if router.renormalize:
            weights = weights / weights.sum(dim=1, keepdim=True)
        weights = weights * getattr(router, "routed_scaling_factor", 1.0)
        return weights.contiguous(), ids.to(kind or torch.int32)

    router._compute_routing = chosen
    try:
        yield
    finally:
        del router._compute_routing


def _layer_owner(model: torch.nn.Module) -> tuple[Any, torch.nn.ModuleList | None]:
    """The module that keeps the decoder layers, and their list."""
    for place in LAYER_PLACES:
        owner: Any = None
        found: Any = model
        for name in place.split("."):
            owner, found = found, getattr(found, name, None)
        if isinstance(found, torch.nn.ModuleList):
            return owner, found
    return None, None
