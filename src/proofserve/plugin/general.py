"""``vllm.general_plugins``: installs the engine-side methods. Loaded in every vLLM process.

Loading must stay light, and happens while vLLM itself is half imported: the imports that the
methods need happen in their first call, which only comes in the engine core.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proofserve.engines.vllm.core_gate import ProofGate
    from proofserve.engines.vllm.core_messages import ProveCall

# The EngineCore method that a posted wakeup names.
WAKEUP = "proofserve_wakeup"


def install() -> None:
    """Add the proof methods to vLLM's EngineCore. Idempotent; nothing of vLLM is replaced.

    Raises ValueError for settings that the engine or the endpoints would refuse later.
    """
    from vllm.v1.engine.core import EngineCore

    from proofserve.settings.node import require_valid_settings

    require_valid_settings()

    EngineCore.proofserve_prove = lambda engine, call: _gate(engine).prove(_prove_call(call))
    EngineCore.proofserve_release = lambda engine, lease: _gate(engine).release(lease)
    EngineCore.proofserve_gauges = lambda engine: _gate(engine).gauges()
    EngineCore.proofserve_measure = lambda engine, call, forwards: _gate(engine).measure(
        _prove_call(call), forwards
    )
    EngineCore.proofserve_take_over = lambda engine: _gate(engine).take_over()
    EngineCore.proofserve_ranks = _ranks
    EngineCore.proofserve_liveness = _liveness
    EngineCore.proofserve_receipts_start = _start_receipts
    EngineCore.proofserve_receipts_answers = lambda engine: engine.proofserve_answers.wait()
    setattr(EngineCore, WAKEUP, lambda engine: _gate(engine).wake_up())


def _gate(engine: Any) -> "ProofGate":
    if not hasattr(engine, "proofserve_gate"):
        from vllm.platforms import current_platform

        from proofserve.engines.vllm.compat_core import VllmCore
        from proofserve.engines.vllm.core_gate import ProofGate, start_wakeups
        from proofserve.settings.node import EngineSettings

        settings = EngineSettings()
        wait_ms = settings.max_wait_ms or (250 if current_platform.is_cpu() else 100)
        core = VllmCore(engine, WAKEUP)
        reporter = engine.proofserve_reporter = core.reporter
        made = engine.proofserve_gate = ProofGate(
            core,
            forward_batch=settings.forward_batch,
            max_wait_s=wait_ms / 1e3,
            share=settings.share,
            lease_idle_s=settings.lease_idle_sec,
        )

        def beat() -> None:
            waiting = len(core.waiting_requests()) + made.waiting_calls
            reporter.beat(core.unfinished_requests() + waiting, core.known_requests() + waiting)
            made.wake_if_needed()

        if core.has_own_loop():
            start_wakeups(beat)
    gate: ProofGate = engine.proofserve_gate
    return gate


def _prove_call(fields: dict[str, Any]) -> "ProveCall":
    from proofserve.engines.vllm.core_messages import ProveCall

    return ProveCall(**fields)


def _liveness(engine: Any) -> dict[str, Any]:
    _gate(engine)
    return asdict(engine.proofserve_reporter.join())


def _ranks(engine: Any, own: dict[str, Any]) -> dict[str, Any]:
    from proofserve.engines.vetting.start import require_equal

    return require_equal(engine, own)


def _start_receipts(engine: Any, scheme: dict[str, Any], most_rows: int) -> None:
    """Tap the workers and watch the scheduler from now on.

    Raises UnsupportedEngine, RuntimeError if that was done before, and what a worker raised.
    """
    from proofserve.engines.receipts.collector import AnswerCollector
    from proofserve.engines.receipts.compat_answers import WatchedCore
    from proofserve.protocol.receipts.sketches import ReceiptScheme

    if hasattr(engine, "proofserve_answers"):
        raise RuntimeError("receipts were started before")
    core = WatchedCore(engine)
    core.start_tap(ReceiptScheme(**scheme), most_rows)
    collector = engine.proofserve_answers = AnswerCollector(core)
    core.watch(collector.ended, collector.stepped)
