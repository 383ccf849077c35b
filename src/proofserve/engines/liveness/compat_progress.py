"""vLLM's private names about progress: steps and requests of a core, requests of a client."""

from collections import Counter
from typing import Any

from proofserve.engines.liveness.memory import CoreReporter, Doing


def report_steps(engine: Any, reporter: CoreReporter) -> None:
    """Have the loop of an EngineCoreProc report each step of chat that computed something.

    A step that only waits, for the cache of another server for example, is none.

    Relies on: EngineCore.step_fn being an attribute of the instance, and returning its outputs,
    which may be None, and whether the model was executed.
    """
    step = engine.step_fn

    def reported_step() -> Any:
        with reporter.doing(Doing.CHAT):
            outputs, executed = step()
            if outputs or executed:
                reporter.stepped()
        return outputs, executed

    engine.step_fn = reported_step


def requests_in_core(engine: Any) -> int:
    """Requests of the scheduler, also those that it may not step now. Safe from any thread.

    Relies on: Scheduler.requests.
    """
    return len(engine.scheduler.requests)


def unfinished_by_core(engine_client: Any) -> list[int]:
    """How many chat requests of this API process each engine core has not finished.

    Relies on: AsyncLLM.output_processor.request_states; AsyncLLM.engine_core.core_engines, and
    DPLBAsyncMPClient.reqs_in_flight, which only a client that chooses among cores has.
    """
    cores = list(engine_client.engine_core.core_engines)
    requests = engine_client.output_processor.request_states
    if len(cores) == 1:
        return [len(requests)]
    core_of = engine_client.engine_core.reqs_in_flight
    counts = Counter(core_of.get(request) for request in list(requests))
    return [counts[core] for core in cores]
