"""vLLM's private names inside the engine core: its loop, its message queue, its KV blocks."""

import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.kv_cache_interface import AttentionSpec, UniformTypeKVCacheSpecs

from proofserve.engines.liveness.memory import CoreReporter, Doing
from proofserve.engines.vllm.core_messages import Forward
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.engines.vllm.worker import prove


class VllmCore:
    """What the gate needs of an engine core, a ``vllm.v1.engine.core.EngineCore``.

    ``wakeup``: name of the EngineCore method under which the plugin installs the gate's
    ``wake_up``. ``reporter`` hears of forwards, and of steps of chat once they are watched. All
    methods run on the core's loop thread, except ``post_wakeup`` and those that count requests.
    Times are seconds of ``time.monotonic``.
    """

    def __init__(self, engine: Any, wakeup: str) -> None:
        self.reporter = CoreReporter()
        self._engine = engine
        self._wakeup = wakeup
        self._feed_watchdog = watchdog_feed()

    def has_own_loop(self) -> bool:
        """Whether it runs a loop in a process of its own; otherwise its caller steps it.

        Relies on: EngineCoreProc.input_queue.
        """
        return hasattr(self._engine, "input_queue")

    def is_busy(self) -> bool:
        """Whether there is chat to step, or a chat request in the message queue.

        Relies on: EngineCoreProc.has_work; scheduler.has_unfinished_requests.
        """
        if self.has_own_loop():
            return bool(self._engine.has_work()) or self.waiting_requests() != []
        return bool(self._engine.scheduler.has_unfinished_requests())

    def unfinished_requests(self) -> int:
        """Those of the scheduler. Relies on: its get_num_unfinished_requests."""
        return int(self._engine.scheduler.get_num_unfinished_requests())

    def known_requests(self) -> int:
        """Those of the scheduler, also those that it may not step now.

        Relies on: Scheduler.requests.
        """
        return len(self._engine.scheduler.requests)

    def waiting_requests(self) -> list[str]:
        """Ids of the chat requests in the message queue, not yet taken up by the loop.

        Relies on: input_queue items being ``(EngineCoreRequestType, (Request, wave))``.
        """
        return [request.request_id for request in self._queued()]

    def _queued(self) -> list[Any]:
        if not self.has_own_loop():
            return []
        queue = self._engine.input_queue
        with queue.mutex:
            items = list(queue.queue)
        return [body[0] for kind, body in items if kind == EngineCoreRequestType.ADD]

    def waited(self, request_id: str, start: float, end: float) -> None:
        """Note that a request in the message queue waited for proofs."""
        for request in self._queued():
            if request.request_id == request_id:
                make_span(request, start, end)

    def delayed(self, start: float, end: float) -> None:
        """The same of every unfinished request. Relies on: Scheduler.requests, by request id."""
        for request in self._engine.scheduler.requests.values():
            make_span(request, start, end)

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as the core has no work.

        Relies on: EngineCoreProc._idle_state_callbacks. The core pops them until none is left
        before it looks at its queue, so a callback must not register itself again.
        """
        self._engine._idle_state_callbacks.append(lambda _engine: callback())

    def await_message(self, seconds: float) -> None:
        """Sleep until a message for the core arrives, at most ``seconds``.

        Relies on: input_queue being a ``queue.Queue`` (not_empty, queue).
        """
        queue = self._engine.input_queue
        with queue.not_empty:
            queue.not_empty.wait_for(lambda: len(queue.queue) > 0, seconds)

    def post_wakeup(self) -> None:
        """Queue a message that makes the loop call ``ProofGate.wake_up``. Thread-safe.

        Relies on: input_queue and the utility message ``(client, call id, method, args)``. The
        method must return a Future that is never completed, so that no client is answered.

        One is enough: between two forwards the core takes one message, so a second one would stay
        in the queue as long as proofs run, and each message of a client would wait for it too.
        """
        message = (EngineCoreRequestType.UTILITY, (0, 0, self._wakeup, ()))
        queue = self._engine.input_queue
        with queue.mutex:
            is_posted = message in queue.queue
        if not is_posted:
            queue.put_nowait(message)

    def watch(
        self,
        arrived: Callable[[str], None],
        stepping: Callable[[], None],
        stepped: Callable[[float, float], None],
    ) -> None:
        """Call ``arrived(request id)`` for each chat request, from the thread that receives it,
        ``stepping()`` before each chat step and ``stepped(start, end)`` after it.

        The reporter hears of each step of chat that computed something. A step that only waits, for
        the cache of another server for example, is none.

        Relies on: EngineCoreProc.preprocess_add_request being looked up on the instance by the
        thread that reads the core's sockets; EngineCore.step_fn being an attribute of the
        instance, and returning its outputs, which may be None, and whether the model was executed.
        """
        preprocess, step = self._engine.preprocess_add_request, self._engine.step_fn

        def watched_preprocess(request: Any) -> Any:
            arrived(request.request_id)
            return preprocess(request)

        def watched_step() -> Any:
            # A forward before the step is a part of it.
            with self.reporter.doing(Doing.CHAT):
                stepping()
                start = time.monotonic()
                outputs, executed = step()
                stepped(start, time.monotonic())
                if outputs or executed:
                    self.reporter.stepped()
            return outputs, executed

        self._engine.preprocess_add_request = watched_preprocess
        self._engine.step_fn = watched_step

    def run_forward(self, forward: Forward) -> dict[str, Any] | None:
        """Run ``forward`` on all workers, until they have computed it.

        A ``proved`` reply, None for a part that is not the last. Raises what a worker raised.

        Relies on: EngineCore.collective_rpc taking a callable. It goes by reference, so it must
        be importable in the workers.
        """
        self._feed_watchdog()
        replies: list[dict[str, Any] | None]
        with self.reporter.proving():
            replies = self._engine.collective_rpc(prove, None, (forward,))
        self._feed_watchdog()
        return next((reply for reply in replies if reply is not None), None)

    def layers(self) -> int:
        """Decoder layers, between which a forward may pause; 1 if it cannot.

        A pipeline's stages have some layers each, and run after each other without a pause.

        Relies on: ModelConfig.hf_text_config.num_hidden_layers, as most models have it;
        ParallelConfig.pipeline_parallel_size.
        """
        config = self._engine.vllm_config
        if config.parallel_config.pipeline_parallel_size > 1:
            return 1
        return int(getattr(config.model_config.hf_text_config, "num_hidden_layers", 1))

    def max_sequences(self, seq_len: int) -> int:
        """Sequences of ``seq_len`` tokens that fit one step; may be 0.

        Relies on: scheduler_config.max_num_batched_tokens, .max_num_seqs.
        """
        scheduler = self._engine.vllm_config.scheduler_config
        fits = int(scheduler.max_num_batched_tokens) // seq_len
        return min(int(scheduler.max_num_seqs), fits)

    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per KV block of each KV-cache group, in their order.

        Raises UnsupportedEngine for a group that is not an attention cache.

        Relies on: scheduler.kv_cache_config.kv_cache_groups[i].kv_cache_spec.
        """
        sizes = []
        for group in self._engine.scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            if not isinstance(spec, AttentionSpec | UniformTypeKVCacheSpecs):
                raise UnsupportedEngine(
                    f"the model keeps {type(spec).__name__} state in its cache; proofs are served "
                    "for models whose every layer keeps attention keys and values."
                )
            sizes.append(int(spec.block_size))
        return tuple(sizes)

    def take_blocks(self, count: int) -> list[Any]:
        """Take KV blocks (each has a ``block_id``) from chat's pool. Raises ValueError.

        Relies on: block_pool.get_new_blocks raising it if too few are free.
        """
        return list(self._pool.get_new_blocks(count))

    def return_blocks(self, blocks: Sequence[Any]) -> None:
        """Relies on: block_pool.free_blocks."""
        self._pool.free_blocks(blocks)

    def free_blocks(self) -> int:
        """Blocks that neither a request nor a lease holds.

        Relies on: block_pool.get_num_free_blocks.
        """
        return int(self._pool.get_num_free_blocks())

    @property
    def _pool(self) -> Any:
        return self._engine.scheduler.kv_cache_manager.block_pool


def make_span(request: Any, start: float, end: float) -> None:
    """Tell the client's trace of a wait for proofs. vLLM keeps the headers of traces only if it
    exports traces, by the tracer that it sets in this process.

    Relies on: Request.trace_headers.
    """
    if not request.trace_headers:
        return
    from opentelemetry import trace  # noqa: PLC0415
    from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415

    context = tracecontext.TraceContextTextMapPropagator().extract(request.trace_headers)
    since_epoch = time.time() - time.monotonic()
    began, ended = (int((since_epoch + each) * 1e9) for each in (start, end))
    tracer = trace.get_tracer("proofserve.node")
    tracer.start_span("wait for proofs", context, start_time=began).end(ended)


def watchdog_feed() -> Callable[[], None]:
    """What tells vLLM's watchdog that this process makes progress; before 0.33 there is none.

    vLLM feeds it before each step of chat. Without this, minutes of proofs would look like a hang,
    and the watchdog (``--watchdog-config``) would write the stacks of all threads.

    Relies on: vllm.utils.watch_dog.get_watch_dog().feed(). The watchdog starts after the engine.
    """
    with suppress(ImportError):
        watch_dog = importlib.import_module("vllm.utils.watch_dog")
        return lambda: watch_dog.get_watch_dog().feed()
    return lambda: None


# How long all ranks may take to answer, seconds.
ANSWER_S = 60.0


def ask_ranks(engine: Any, report: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``report`` gives on each worker of this core, on all nodes, in the order of their ranks.

    Raises UnsupportedEngine if one did not answer; TimeoutError, or what the executor raises for a
    worker that failed.

    Relies on: EngineCore.collective_rpc taking a callable, which every executor pickles by
    cloudpickle and calls with the worker, or with a wrapper that passes attributes on;
    WorkerBase.rank; ParallelConfig.world_size.
    """
    reports = list(engine.collective_rpc(report, ANSWER_S))
    ranks = engine.vllm_config.parallel_config.world_size
    if len(reports) != ranks:
        raise UnsupportedEngine(f"{len(reports)} of {ranks} ranks answered")
    return reports
