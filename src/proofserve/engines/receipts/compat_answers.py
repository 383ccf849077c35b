"""vLLM's private names for receipts: in the API process, in the engine core and in its workers."""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from proofserve.engines.receipts.tap import Rows, SampledRows, Tap, Wanted
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme

# The attribute of a Request that keeps the id which vLLM's API gave to it.
EXTERNAL_ID = "proofserve_external_id"


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """A request that the scheduler has finished. ``prompt`` and ``output`` are ids, u32 LE.

    ``external_id`` is the id that vLLM's API gave to the request, ``request_id`` vLLM's own one.
    ``sketches`` are float16 LE [output tokens, k_dim], None before they are fetched or if rows were
    lost.
    """

    request_id: str
    external_id: str
    adapter: str | None
    sampling: Sampling
    prompt: bytes
    output: bytes
    finish_reason: str
    created_ms: int
    sketches: bytes | None = None

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.request_id, len(self.prompt) // 4 - 1, len(self.output) // 4)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> "EndedAnswer":
        return cls(**{**wire, "sampling": Sampling(**wire["sampling"])})


class WatchedCore:
    """A ``vllm.v1.engine.core.EngineCoreProc`` as the collector needs it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def start_tap(self, scheme: ReceiptScheme, most_rows: int) -> None:
        """Tap the workers. Raises UnsupportedEngine unless exactly one rank has the rows.

        Relies on: EngineCore.collective_rpc taking a callable that the workers can import.
        """
        tapped = sum(self._engine.collective_rpc(start_tap, None, (scheme, most_rows)))
        if tapped != 1:
            raise UnsupportedEngine(f"{tapped} workers have the rows that chose tokens, not one")

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as the core has no work.

        Relies on: EngineCoreProc._idle_state_callbacks; see ``compat_core``.
        """
        self._engine._idle_state_callbacks.append(lambda _engine: callback())

    def unfinished(self) -> list[str]:
        """Ids of the requests that the scheduler knows. Relies on: Scheduler.requests, by id."""
        return list(self._engine.scheduler.requests)

    def fetch_rows(self, wanted: Sequence[Wanted], alive: Sequence[str]) -> Callable[[], Rows]:
        """Ask the workers for rows, and to forget those of requests that are not ``alive``.

        The returned function waits for the reply; it raises what a worker raised.

        Relies on: Executor.collective_rpc(non_block) giving a Future, and workers running calls in
        the order in which the core made them.
        """
        args = (list(wanted), list(alive))
        future = self._engine.model_executor.collective_rpc(fetch_rows, None, args, non_block=True)
        return lambda: next(rows for rows in future.result() if rows is not None)

    def watch(self, ended: Callable[[EndedAnswer], None], stepped: Callable[[], None]) -> None:
        """Call ``ended`` for each request that the scheduler finishes with tokens of its own, and
        ``stepped`` after each step's outputs are on their way.

        Relies on: Scheduler._free_request being looked up on the scheduler and called once for a
        request, when it has its final status; EngineCoreProc.post_step and .preprocess_add_request
        being looked up on the core; EngineCoreRequest.external_req_id.
        """
        engine, scheduler = self._engine, self._engine.scheduler
        free, post_step = scheduler._free_request, engine.post_step
        preprocess = engine.preprocess_add_request

        def watched_free(request: Any, *args: Any, **kwargs: Any) -> Any:
            if has_receipt(request):
                ended(ended_answer(request, restricted=self.changes_logits()))
            return free(request, *args, **kwargs)

        def watched_post_step(*args: Any, **kwargs: Any) -> Any:
            result = post_step(*args, **kwargs)
            stepped()
            return result

        def watched_preprocess(request: Any) -> Any:
            made, wave = preprocess(request)
            setattr(made, EXTERNAL_ID, request.external_req_id or request.request_id)
            return made, wave

        scheduler._free_request = watched_free
        engine.post_step = watched_post_step
        engine.preprocess_add_request = watched_preprocess

    def changes_logits(self) -> bool:
        """Whether the server changes the logits of every request.

        Relies on: VllmConfig.watermark_config, which 0.29 does not have, and
        ModelConfig.logits_processors.
        """
        config = self._engine.vllm_config
        watermarks = getattr(config, "watermark_config", None)
        return bool(watermarks or config.model_config.logits_processors)


def has_receipt(request: Any) -> bool:
    """Whether the ids of ``request`` say what the model read, and it chose tokens.

    Not so for embeddings, prompts given as embeddings, images and sound, and sessions whose prompt
    grows while they run.

    Relies on: Request.sampling_params, .prompt_token_ids, .prompt_embeds, .mm_features,
    .resumable, .num_output_tokens.
    """
    if request.sampling_params is None or not request.prompt_token_ids:
        return False
    other = request.prompt_embeds is not None or request.mm_features or request.resumable
    return not other and request.num_output_tokens > 0


def ended_answer(request: Any, restricted: bool) -> EndedAnswer:
    """``restricted``: see ``record.Sampling``, by the server's own options.

    Relies on: Request.request_id, .output_token_ids, .lora_request, .get_finished_reason.
    """
    adapter = request.lora_request
    return EndedAnswer(
        request_id=request.request_id,
        external_id=getattr(request, EXTERNAL_ID, request.request_id),
        adapter=None if adapter is None else str(adapter.lora_name),
        sampling=sampling_of(request.sampling_params, restricted),
        prompt=np.array(request.prompt_token_ids, "<u4").tobytes(),
        output=np.array(list(request.output_token_ids), "<u4").tobytes(),
        finish_reason=str(request.get_finished_reason()),
        created_ms=int(time.time() * 1e3),
    )


def sampling_of(params: Any, restricted: bool = False) -> Sampling:
    """Relies on: SamplingParams and its field names."""
    changes = (
        params.structured_outputs,
        params.logit_bias,
        params.allowed_token_ids,
        params.bad_words,
        params.min_tokens,
        # Versions before 0.29 lack it.
        getattr(params, "trace_decode_token_ids", None),
    )
    budget = params.thinking_token_budget is not None
    return Sampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=max(0, int(params.top_k)),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        restricted=restricted or budget or any(changes),
    )


# Requests of which something is remembered; the oldest go first, as their answers never came.
MOST_REQUESTS = 16_384


class RequestNotes:
    """Remembers of an engine client's requests what the engine core cannot know.

    A stop string ends an answer in the API process; the core sees a request that was aborted, and
    may be a token or two ahead. Of a request for several answers the core sees requests that know
    nothing of each other.

    Relies on: AsyncLLM.output_processor, and its add_request(request, prompt, parent_req, ...) and
    process_outputs(outputs, ...).reqs_to_abort being looked up on it; its request_states, and
    their detokenizer.num_output_tokens(); ParentRequest.n.
    """

    def __init__(self, engine_client: Any) -> None:
        self._stopped: OrderedDict[str, int] = OrderedDict()
        self._siblings: OrderedDict[str, int] = OrderedDict()
        processor = engine_client.output_processor
        add, process = processor.add_request, processor.process_outputs
        requests = processor.request_states

        def add_request(
            request: Any, prompt: Any, parent_req: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if parent_req is not None:
                _remember(self._siblings, request.request_id, parent_req.n)
            return add(request, prompt, parent_req, *args, **kwargs)

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # The processor forgets a request as soon as it has ended.
            states = {each.request_id: requests.get(each.request_id) for each in outputs}
            processed = process(outputs, *args, **kwargs)
            for request_id in processed.reqs_to_abort:
                tokens = states[request_id].detokenizer.num_output_tokens()
                _remember(self._stopped, request_id, tokens)
            return processed

        processor.add_request, processor.process_outputs = add_request, process_outputs

    def take(self, request_id: str) -> tuple[int | None, int]:
        """After how many tokens a stop string ended the request, None if none did.

        Then how many answers it is one of.
        """
        return self._stopped.pop(request_id, None), self._siblings.pop(request_id, 1)


def _remember(kept: "OrderedDict[str, int]", request_id: str, number: int) -> None:
    kept[request_id] = number
    while len(kept) > MOST_REQUESTS:
        kept.popitem(last=False)


def before_sampling(worker: Any, take: Callable[[SampledRows], None]) -> None:
    """Call ``take`` in each step, between the forward and the choice of tokens.

    Raises UnsupportedEngine if the worker or its model runner lacks the names.

    Relies on: Worker.sample_tokens being looked up on the worker for each step;
    WorkerWrapperBase.worker; execute_model_state of either model runner being set from the forward
    until sample_tokens reads it.
    """
    inner = getattr(worker, "worker", worker)
    runner = inner.model_runner
    if not hasattr(inner, "sample_tokens") or not hasattr(runner, "execute_model_state"):
        raise UnsupportedEngine(
            f"{type(runner).__name__} does not keep the rows that chose the tokens; start without "
            "--receipts."
        )
    sample = inner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        if state is not None:
            take(sampled_rows(runner, state))
        return sample(*args, **kwargs)

    inner.sample_tokens = sample_tokens


def sampled_rows(runner: Any, state: Any) -> SampledRows:
    """The rows of a step, from ``state``, the runner's execute_model_state.

    Without speculative decoding a request has one row in a step.

    Relies on: the second runner's state having ``input_batch``, the first one's not.
    """
    return _second_runner(state) if hasattr(state, "input_batch") else _first_runner(runner, state)


def _first_runner(runner: Any, state: Any) -> SampledRows:
    """Relies on: ExecuteModelState.sample_hidden_states, .scheduler_output.num_scheduled_tokens;
    GPUModelRunner.input_batch.req_ids, .num_reqs, .num_computed_tokens_cpu.
    """
    batch = runner.input_batch
    ids = list(batch.req_ids[: batch.num_reqs])
    scheduled = state.scheduler_output.num_scheduled_tokens
    added = np.array([scheduled[name] for name in ids], np.int64)
    positions = batch.num_computed_tokens_cpu[: len(ids)] + added - 1
    return SampledRows(ids, positions, lambda: state.sample_hidden_states[: len(ids)])


def _second_runner(state: Any) -> SampledRows:
    """Relies on: ExecuteModelState.hidden_states and .input_batch; InputBatch.req_ids,
    .num_computed_tokens_np, .num_scheduled_tokens, .logits_indices.
    """
    batch = state.input_batch
    ids = list(batch.req_ids)
    ends = batch.num_computed_tokens_np[: len(ids)] + batch.num_scheduled_tokens[: len(ids)]
    hidden, places = state.hidden_states, batch.logits_indices[: len(ids)]
    return SampledRows(ids, ends.astype(np.int64) - 1, lambda: hidden[places])


def start_tap(worker: Any, scheme: ReceiptScheme, most_rows: int) -> bool:
    """Tap this worker if its rank has the rows; return whether it has. Runs on every rank.

    The first rank of the last pipeline stage keeps them. Raises UnsupportedEngine for a model
    runner that lacks the names which the tap reads.

    Relies on: get_pp_group, get_tp_group; the final norm's output being whole on every rank of a
    tensor-parallel group.
    """
    if not (get_pp_group().is_last_rank and get_tp_group().is_first_rank):
        return False
    runner = worker.model_runner
    device = torch.device(runner.device)
    projection = scheme.rows(runner.model_config.get_hidden_size(), device)
    tap = Tap(projection, most_rows)
    before_sampling(worker, tap.take)
    worker.proofserve_tap = tap
    return True


def fetch_rows(worker: Any, wanted: Sequence[Wanted], alive: Collection[str]) -> Rows | None:
    """``Tap.fetch`` on the rank with the rows, None on the others."""
    tap: Tap | None = getattr(worker, "proofserve_tap", None)
    return None if tap is None else tap.fetch(wanted, alive)
