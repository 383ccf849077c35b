"""The Prometheus metrics of a node. This module counts nothing: a scrape reads the node."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from proofserve.api.node import Node, ServedNode, answer_of_outbox, read_engine, read_receipts
from proofserve.api.response_models import refused
from proofserve.rounds.state import State
from proofserve.rounds.status import (
    FORWARD_BOUNDS_S,
    CoreLiveness,
    EngineGauges,
    OutboxGauges,
    ReceiptGauges,
    Status,
)
from proofserve.web import counter, gauge, histogram

PREFIX = "proofserve"
# Longer than any reading takes: after it the scrape goes on without the node's metrics.
READING_S = 8.0
_INFO_LABELS = ("scheme", "vllm_version", "version")
_counter, _gauge = partial(counter, PREFIX), partial(gauge, PREFIX)


def add_to(router: APIRouter) -> None:
    """Add a page with the node's own metrics: with several API processes vLLM's has none."""
    router.get("/metrics", response_class=PlainTextResponse, responses=refused(503))(page)


async def page(node: ServedNode) -> PlainTextResponse:
    """The node's metrics in the text format of Prometheus, without vLLM's own."""
    families = await _families(node)
    text = generate_latest(NodeCollector(lambda: families))
    return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)


@contextmanager
def exposed(node: Node, registry: CollectorRegistry = REGISTRY) -> Iterator[None]:
    """Show ``node``, which lives on the running loop, in ``registry`` until the context ends."""
    collector = NodeCollector(partial(read_from_thread, node, asyncio.get_running_loop()))
    registry.register(collector)
    try:
        yield
    finally:
        registry.unregister(collector)


class NodeCollector(Collector):
    """Shows what ``read`` gives, without a reading when it is registered."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Announce no names, because that would read the node at registration."""
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._read()


def read_from_thread(node: Node, loop: asyncio.AbstractEventLoop) -> Iterable[Metric]:
    """The metrics of ``node``, whose ``loop`` runs in another thread than this scrape.

    A scrape on the loop's own thread cannot wait for a reading, so it gets no metrics of the node.
    A reading that fails does not break the other metrics of the page either.
    """
    if loop.is_closed():
        return ()
    with suppress(RuntimeError):  # of a thread without a loop
        if asyncio.get_running_loop() is loop:
            return ()
    future = asyncio.run_coroutine_threadsafe(_families(node), loop)
    try:
        return future.result(READING_S)
    except TimeoutError:
        future.cancel()
        return ()


async def _families(node: Node) -> list[Metric]:
    """All metrics. Takes as long as the slower of engine and outbox, at most 5 s."""
    of_outbox = answer_of_outbox(node.outbox.gauges())
    parts = await asyncio.gather(read_engine(node), of_outbox, read_receipts(node))
    (engine, _), (outbox, _), (receipts, _) = parts
    versions = node.deployment.engine_info.versions
    scheme = node.deployment.scheme or "any"
    here = {(scheme, versions.get("vllm", ""), versions.get("proofserve", "")): 1}
    up = {("engine",): engine is not None, ("outbox",): outbox is not None}
    return [
        _gauge("info", "The node's scheme and versions; always 1.", here, *_INFO_LABELS),
        *_work(node),
        *_round(node.manager.status()),
        _gauge("up", "Whether a part of the node answered this scrape.", up, "part"),
        _gauge("tasks", "Tasks of the event loop; constant while idle.", len(asyncio.all_tasks())),
        *_liveness(node.liveness()),
        *(_engine(engine) if engine is not None else ()),
        *(_cores(engine, node.manager.status()) if engine is not None else ()),
        *(_outbox(outbox) if outbox is not None else ()),
        *(_receipts(receipts) if receipts is not None else ()),
    ]


def _work(node: Node) -> Iterator[Metric]:
    totals = node.manager.totals
    stored = "Nonces by outcome; those of rounds count once they are stored."
    yield _counter("nonces", stored, totals.nonces, "work", "outcome")
    verdicts = {(verdict,): count for verdict, count in totals.validations.items()}
    judged = "Validations by verdict; error: no verdict was possible."
    yield _counter("validations", judged, verdicts, "outcome")
    yield _counter("engine_faults", "Engine calls of rounds that failed.", totals.faults)
    refusals = {(str(status), why): count for (status, why), count in node.refusals.items()}
    yield _counter("refusals", "Refused requests.", refusals, "status", "reason")


def _round(status: Status) -> Iterator[Metric]:
    running = status.state is State.GENERATING
    rate = status.stats.recent_nonces_per_second if running and status.stats is not None else 0.0
    yield _gauge("nonces_per_second", "Rate of the running round over 30 s, or 0.", rate)
    states = {(state.value,): state is status.state for state in State}
    yield _gauge("round_state", "1 for the state that the node is in.", states, "state")
    text = "1 while a fault of engine or outbox stops the round."
    yield _gauge("round_paused", text, status.paused_reason is not None)
    text = "Nonces of jobs and validations that wait or run."
    yield _gauge("queued_nonces", text, status.queue.queued_nonces)


def _liveness(cores: Iterable[CoreLiveness]) -> Iterator[Metric]:
    """Read without an answer of the engine, which one that hangs does not give."""
    watched = {(str(each.core),): each for each in cores if each.watched}
    waited = {label: each.waited_s for label, each in watched.items()}
    text = "Seconds since the last step of an engine core that has work, otherwise 0."
    yield _gauge("core_step_age_seconds", text, waited, "core")
    stalled = {label: each.stalled for label, each in watched.items()}
    text = "1 for an engine core that hangs: it has work, and neither steps nor computes."
    yield _gauge("core_stalled", text, stalled, "core")


def _cores(engine: EngineGauges, status: Status) -> Iterator[Metric]:
    """What an operator looks for in one engine core; there is at least one."""
    cores = {(str(index),): core for index, core in enumerate(engine.cores or (engine,))}
    busy = {label: core.busy_s for label, core in cores.items()}
    yield _counter("core_busy_seconds", "The same for each engine core.", busy, "core")
    deferred = {label: core.deferred_s for label, core in cores.items()}
    yield _counter("core_deferred_seconds", "The same for each engine core.", deferred, "core")
    stopped = dict.fromkeys(cores, False)
    stopped |= {(str(core.core),): core.stopped for core in status.cores}
    text = "1 for an engine core that proves no more in the running round."
    yield _gauge("core_stopped", text, stopped, "core")


def _engine(engine: EngineGauges) -> Iterator[Metric]:
    yield _counter("busy_seconds", "Engine time that proof forwards took.", engine.busy_s)
    text = "Engine time of chat while proofs waited for it."
    yield _counter("deferred_seconds", text, engine.deferred_s)
    forwards = {(): (engine.forward_counts, engine.busy_s)} if engine.forward_counts else {}
    text = "Duration of a proof forward."
    yield histogram(PREFIX, "forward_seconds", text, FORWARD_BOUNDS_S, forwards)
    longest = engine.longest_chat_wait_s
    yield _gauge("longest_chat_wait_seconds", "Longest wait of chat for proofs.", longest)
    text = "Longest wait of chat for proofs that the operator allows; 0 without a limit."
    yield _gauge("max_wait_seconds", text, engine.max_wait_s)
    text = "1 while forwards of proofs take longer than that."
    yield _gauge("over_max_wait", text, engine.warning is not None)
    text = "Nonces of a forward of the newest shape."
    yield _gauge("forward_nonces", text, engine.forward_nonces)
    text = "Age of the engine's values; more than 0: busy."
    yield _gauge("engine_age_seconds", text, engine.age_s)
    yield _gauge("leased_blocks", "KV blocks on lease to proofs.", engine.leased_blocks)
    yield _gauge("free_blocks", "KV blocks that are free.", engine.free_blocks)


def _outbox(outbox: OutboxGauges) -> Iterator[Metric]:
    # A counter never goes down: callbacks that were made due again had expired, too.
    expired = outbox.expired + outbox.revived
    ended = {("delivered",): outbox.delivered, ("expired",): expired}
    yield _counter("callbacks", "Callbacks by outcome, of the whole file.", ended, "outcome")
    text = "Attempts to deliver a callback that failed."
    yield _counter("callback_failures", text, outbox.failed_attempts)
    yield _gauge("outbox_results", "Results kept in the file.", outbox.results)
    yield _gauge("outbox_pending", "Callbacks not delivered yet.", outbox.pending)
    text = "Age of the oldest callback not delivered yet."
    yield _gauge("outbox_oldest_pending_seconds", text, outbox.oldest_pending_s)


def _receipts(receipts: ReceiptGauges) -> Iterator[Metric]:
    yield _counter("receipts", "Receipts stored, over the whole file.", receipts.stored)
    without = {(reason,): count for reason, count in receipts.without.items()}
    text = "Answers without a receipt, over the whole file."
    yield _counter("answers_without_receipt", text, without, "reason")
    yield _counter("log_entries", "Entries of the log of receipts.", receipts.log_entries)
    yield _gauge("receipts_kept", "Receipts not deleted yet.", receipts.kept)
    text = "Stored receipts that the log has not yet."
    yield _gauge("receipts_unlogged", text, receipts.unlogged)
    text = "Answers whose receipts are not stored yet."
    yield _gauge("receipts_waiting", text, receipts.waiting)
