"""vLLM's private names in the engine core for receipts: requests that end, and the workers."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from proofserve.engines.receipts import tap
from proofserve.engines.receipts.collector import EndedAnswer, Rows, Wanted
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.protocol.receipts.record import Sampling
from proofserve.protocol.receipts.sketches import ReceiptScheme

# The attribute of a Request that keeps the id which vLLM's API gave to it.
EXTERNAL_ID = "proofserve_external_id"


class WatchedCore:
    """A ``vllm.v1.engine.core.EngineCoreProc`` as an ``AnswersPort``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def start_tap(self, scheme: ReceiptScheme, most_rows: int) -> None:
        """Tap the workers. Raises UnsupportedEngine unless exactly one rank has the rows.

        Relies on: EngineCore.collective_rpc taking a callable that the workers can import.
        """
        tapped = sum(self._engine.collective_rpc(tap.start, None, (scheme, most_rows)))
        if tapped != 1:
            raise UnsupportedEngine(f"{tapped} workers have the rows that chose tokens, not one")

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Relies on: EngineCoreProc._idle_state_callbacks; see ``compat_core``."""
        self._engine._idle_state_callbacks.append(lambda _engine: callback())

    def unfinished(self) -> list[str]:
        """Relies on: Scheduler.requests, by request id."""
        return list(self._engine.scheduler.requests)

    def fetch_rows(self, wanted: Sequence[Wanted], alive: Sequence[str]) -> Callable[[], Rows]:
        """Relies on: Executor.collective_rpc(non_block) giving a Future, and workers running calls
        in the order in which the core made them.
        """
        args = (list(wanted), list(alive))
        future = self._engine.model_executor.collective_rpc(tap.fetch, None, args, non_block=True)
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
