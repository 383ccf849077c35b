"""What ``plugin.general`` starts in vLLM's engine core beside the gate: liveness and receipts."""

from collections.abc import Callable
from typing import Any

from proofserve.engines.liveness.compat_progress import report_steps, requests_in_core
from proofserve.engines.liveness.memory import CoreReporter
from proofserve.engines.receipts.collector import AnswerCollector
from proofserve.engines.receipts.compat_answers import WatchedCore
from proofserve.engines.vllm.core_gate import ProofGate
from proofserve.engines.vllm.core_port import CorePort
from proofserve.protocol.receipts.sketches import ReceiptScheme


def report_progress(
    engine: Any, core: CorePort, gate: ProofGate, reporter: CoreReporter
) -> Callable[[], None]:
    """Report each step from now on. Returns what a thread must call each second.

    It is called after the gate has begun to watch steps: a forward before a step is a part of it.
    """
    report_steps(engine, reporter)

    def beat() -> None:
        waiting = len(core.waiting_requests()) + gate.waiting_calls
        reporter.beat(core.unfinished_requests() + waiting, requests_in_core(engine) + waiting)
        gate.wake_if_needed()

    return beat


def start_receipts(engine: Any, scheme: dict[str, Any], most_rows: int) -> None:
    """Tap the workers and watch the scheduler from now on.

    Raises UnsupportedEngine, RuntimeError if that was done before, and what a worker raised.
    """
    if hasattr(engine, "proofserve_answers"):
        raise RuntimeError("receipts were started before")
    core = WatchedCore(engine)
    core.start_tap(ReceiptScheme(**scheme), most_rows)
    engine.proofserve_answers = AnswerCollector(core)
    core.watch(engine.proofserve_answers.ended, engine.proofserve_answers.stepped)
