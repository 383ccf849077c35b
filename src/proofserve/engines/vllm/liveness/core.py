"""What ``plugin.general`` starts in vLLM's engine core."""

from collections.abc import Callable
from typing import Any

from proofserve.engines.vllm.core_gate import ProofGate
from proofserve.engines.vllm.core_port import CorePort
from proofserve.engines.vllm.liveness.compat_progress import report_steps, requests_in_core
from proofserve.engines.vllm.liveness.reporter import CoreReporter


def start(
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
