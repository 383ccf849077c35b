"""Every name of vLLM that is not its public interface, in one place.

The rest of the adapter calls these functions and never looks inside a vLLM object. Each one
names what it relies on; ``tests/contract`` pins those names for the vetted versions, so that an
upgrade fails in a test that says which caller breaks, not in a running node.

vLLM's objects are ``Any`` here on purpose: their annotations move with every release.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from proofserve.engines.vllm.vetting import UnsupportedEngine

_logger = logging.getLogger(__name__)

# Where models keep their decoder layers; the first three as in protocol A.3.
LAYER_PLACES = (
    "model.layers",
    "transformer.h",
    "layers",
    "language_model.model.layers",
    "model.language_model.layers",
)

# -- API process -----------------------------------------------------------------------------


def before_shutdown(
    engine_client: Any, step: Callable[[], Coroutine[Any, Any, None]], seconds: float
) -> None:
    """Run ``step`` on the present loop, ``seconds`` at most, before vLLM's server ends the engine.

    That server ends it first of all, from another thread and while its loop still runs; the
    application's lifespan comes later. Whoever ends it on the loop itself has no such need.

    Relies on: AsyncLLM.shutdown(timeout), called by the launcher in an executor.
    """
    loop, home, shutdown = asyncio.get_running_loop(), threading.get_ident(), engine_client.shutdown

    def step_and_shutdown(timeout: float | None = None) -> None:
        if threading.get_ident() != home and loop.is_running():
            last = asyncio.run_coroutine_threadsafe(step(), loop)
            if not wait([last], seconds).done:
                _logger.warning("the engine ends now: what needed it took over %g s", seconds)
            elif error := last.exception():
                _logger.error("what needed the engine failed at its end", exc_info=error)
        shutdown(timeout=timeout)

    engine_client.shutdown = step_and_shutdown


async def call_engine(engine_client: Any, method: str, *args: Any) -> Any:
    """Run an EngineCore method between two engine steps and await its result.

    Relies on: AsyncLLM.engine_core.call_utility_async.
    """
    return await engine_client.engine_core.call_utility_async(method, *args)


def call_engine_sync(llm_engine: Any, method: str, *args: Any) -> Any:
    """Run an EngineCore method of a synchronous engine, in this process or in its own.

    Relies on: LLMEngine.engine_core being an InprocClient (``.engine_core``) or a SyncMPClient
    (``.call_utility``).
    """
    client = llm_engine.engine_core
    if hasattr(client, "call_utility"):
        return client.call_utility(method, *args)
    result = getattr(client.engine_core, method)(*args)
    return result.result() if isinstance(result, Future) else result


def is_engine_dead(error: BaseException) -> bool:
    """Whether a failed engine call means that there is no engine any more."""
    return isinstance(error, EngineDeadError)


# -- engine core -----------------------------------------------------------------------------


def has_own_loop(engine: Any) -> bool:
    """Whether the core runs its busy loop in a process of its own (else its caller steps it)."""
    return hasattr(engine, "input_queue")


def is_busy(engine: Any) -> bool:
    """Whether the core has chat to step or chat waiting at its door.

    Relies on: EngineCoreProc.has_work, .input_queue; EngineCore.scheduler.has_unfinished_requests.
    """
    if has_own_loop(engine):
        return bool(engine.has_work()) or waiting_requests(engine) != []
    return bool(engine.scheduler.has_unfinished_requests())


def unfinished_requests(engine: Any) -> int:
    """Chat requests the scheduler has not finished."""
    return int(engine.scheduler.get_num_unfinished_requests())


def waiting_requests(engine: Any) -> list[str]:
    """Ids of chat requests that reached the core while its loop was elsewhere.

    Relies on: input_queue items being ``(EngineCoreRequestType, (Request, wave))``.
    """
    queue = engine.input_queue
    with queue.mutex:
        items = list(queue.queue)
    return [payload[0].request_id for kind, payload in items if kind == EngineCoreRequestType.ADD]


def call_when_idle(engine: Any, callback: Callable[[Any], None]) -> None:
    """Call ``callback(engine)`` once, as soon as the core has no work.

    Relies on: EngineCoreProc._idle_state_callbacks. The core pops them until none is left
    before it looks at its queue, so a callback must not register itself again.
    """
    engine._idle_state_callbacks.append(callback)


def await_message(engine: Any, seconds: float) -> None:
    """Sleep until a message for the core arrives, at most ``seconds``.

    Relies on: EngineCoreProc.input_queue being a ``queue.Queue`` (``not_empty``, ``queue``).
    """
    queue = engine.input_queue
    with queue.not_empty:
        queue.not_empty.wait_for(lambda: len(queue.queue) > 0, seconds)


def post_turn(engine: Any, method: str) -> None:
    """Have the core's loop call ``method`` after what already waits in its queue. Thread-safe.

    Relies on: input_queue and the utility message ``(client, call id, method, args)``. The
    method must return a Future that is never completed, so that no client is answered.
    """
    engine.input_queue.put_nowait((EngineCoreRequestType.UTILITY, (0, 0, method, ())))


def watch_arrivals(engine: Any, arrived: Callable[[str], None]) -> None:
    """Call ``arrived(request id)`` when a chat request reaches the core. From another thread.

    Relies on: EngineCoreProc.preprocess_add_request being looked up on the instance by the
    thread that reads the core's sockets.
    """
    preprocess = engine.preprocess_add_request

    def watched(request: Any) -> Any:
        arrived(request.request_id)
        return preprocess(request)

    engine.preprocess_add_request = watched


def watch_steps(engine: Any, stepped: Callable[[float, float], None]) -> None:
    """Call ``stepped(start, end)`` after each chat step, seconds of ``time.monotonic``.

    Relies on: EngineCore.step_fn being an attribute of the instance.
    """
    step = engine.step_fn

    def watched() -> Any:
        start = time.monotonic()
        result = step()
        stepped(start, time.monotonic())
        return result

    engine.step_fn = watched


def run_on_workers(engine: Any, function: Callable[..., Any], argument: Any) -> list[Any]:
    """``function(worker, argument)`` on every rank; one result per rank.

    Relies on: EngineCore.collective_rpc taking a callable. It goes by reference, so it must be
    importable in the workers.
    """
    return list(engine.collective_rpc(function, None, (argument,)))


# -- KV blocks -------------------------------------------------------------------------------


def kv_block_sizes(engine: Any) -> tuple[int, ...]:
    """Tokens per block of each KV-cache group, in group order.

    Relies on: scheduler.kv_cache_config.kv_cache_groups[i].kv_cache_spec. Raises
    UnsupportedEngine for a group that is not an attention cache.
    """
    sizes = []
    for group in engine.scheduler.kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, AttentionSpec | UniformTypeKVCacheSpecs):
            raise UnsupportedEngine(
                f"the model keeps {type(spec).__name__} state in its cache; proofs are served "
                "for models whose every layer keeps attention keys and values."
            )
        sizes.append(int(spec.block_size))
    return tuple(sizes)


def take_blocks(engine: Any, count: int) -> list[Any]:
    """Take ``count`` blocks out of the pool that chat draws from. Raises ValueError if too few.

    Relies on: scheduler.kv_cache_manager.block_pool.get_new_blocks; a block has ``block_id``.
    """
    return list(_pool(engine).get_new_blocks(count))


def return_blocks(engine: Any, blocks: Sequence[Any]) -> None:
    """Give leased blocks back. Relies on: block_pool.free_blocks."""
    _pool(engine).free_blocks(blocks)


def free_blocks(engine: Any) -> int:
    """Blocks that no request and no lease holds."""
    return int(_pool(engine).get_num_free_blocks())


def _pool(engine: Any) -> Any:
    return engine.scheduler.kv_cache_manager.block_pool


# -- workers ---------------------------------------------------------------------------------


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
    seq_len: int, starts: torch.Tensor, positions: torch.Tensor, group: dict[str, torch.Tensor]
) -> Any:
    """Metadata of a batch of equal, fresh sequences for one KV-cache group.

    Args:
        seq_len: tokens per sequence.
        starts: int32 [n + 1], where each sequence starts among the tokens, on the CPU.
        positions: int64 [n * seq_len] on the device.
        group: ``block_table`` int32 [n, blocks per sequence] and ``slots`` int64 [n * seq_len].

    Relies on: vllm.v1.attention.backend.CommonAttentionMetadata.
    """
    device = positions.device
    n = starts.numel() - 1
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
        block_table_tensor=group["block_table"],
        slot_mapping=group["slots"],
        causal=True,
        is_prefilling=torch.ones(n, dtype=torch.bool),
        positions=positions,
    )


def group_layer_names(runner: Any) -> list[list[str]]:
    """Names of the attention layers of each KV-cache group."""
    return [list(group.layer_names) for group in runner.kv_cache_config.kv_cache_groups]


def call_model(runner: Any, metadata: dict[str, Any], slots: dict[str, Any], inputs: Any) -> Any:
    """Run the deployed model once, eagerly, and return what its forward returns.

    ``inputs`` holds ``positions``, ``intermediate_tensors`` and ``inputs_embeds``. Compiled
    graphs are skipped: they were traced for token ids and replay chat's buffers.

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
        output = runner._model_forward(input_ids=None, **{**inputs, "positions": positions})
    return output[0] if runner.use_aux_hidden_state_outputs else output


def receive_stage() -> Any:
    """Tensors from the previous pipeline rank, or None on the first.

    Relies on: get_pp_group().recv_tensor_dict, IntermediateTensors.
    """
    if get_pp_group().is_first_rank:
        return None
    return IntermediateTensors(get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group()))


def send_stage(output: Any) -> None:
    """Hand this rank's tensors to the next pipeline rank. Relies on: send_tensor_dict."""
    get_pp_group().send_tensor_dict(output.tensors, all_gather_group=get_tp_group())


def is_first_stage() -> bool:
    """Whether this rank feeds the inputs to the model."""
    return bool(get_pp_group().is_first_rank)


def is_last_stage() -> bool:
    """Whether this rank has the model's output."""
    return bool(get_pp_group().is_last_rank)


def speaks_for_stage() -> bool:
    """Whether this rank answers for its tensor-parallel group: the first does."""
    return bool(get_tp_group().is_first_rank)


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
