"""How vLLM's private names behave on which the watch of engine cores relies.

A failure here after an upgrade says to revisit ``compat_core.py`` and ``compat_client.py``.
"""

from types import SimpleNamespace

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor

from proofserve.engines.liveness.memory import CoreMemory, Doing
from proofserve.engines.vllm.compat_client import unfinished_by_core
from proofserve.engines.vllm.compat_core import VllmCore
from support.contract import in_order, source


def test_the_loop_calls_the_instances_step_and_unpacks_its_two_results() -> None:
    assert "outputs, model_executed = self.step_fn()" in source(EngineCoreProc._process_engine_step)
    assert "self.step_fn = (" in source(EngineCore.__init__)
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        assert "return engine_core_outputs, " in source(step)


def test_a_step_that_computed_counts_and_one_that_only_waited_does_not() -> None:
    results = iter([({0: "tokens"}, True), (None, True), ({0: "tokens"}, False), (None, False)])
    seen: list[float] = []

    def step() -> tuple[object, bool]:
        seen.append(memory.read().doing)
        return next(results)

    engine = SimpleNamespace(step_fn=step, preprocess_add_request=None)
    core = VllmCore(engine, "wakeup")
    memory = CoreMemory.of_core(core.reporter.join())
    core.watch(lambda _id: None, lambda: None, lambda _start, _end: None)
    assert engine.step_fn() == ({0: "tokens"}, True)
    for _ in range(3):
        engine.step_fn()
    assert memory.read().steps == 3
    assert seen == [Doing.CHAT] * 4
    assert memory.read().doing == Doing.NOTHING


def test_the_scheduler_keeps_all_requests_and_counts_those_it_may_step() -> None:
    assert "self.requests: dict[str, Request] = {}" in source(Scheduler.__init__)
    held_back = source(Scheduler.get_num_unfinished_requests)
    assert in_order(held_back, "PauseState.PAUSED_ALL", "return 0")
    assert "self.num_waiting_for_streaming_input" in held_back
    requests = {"a": None, "b": None}
    engine = SimpleNamespace(scheduler=SimpleNamespace(requests=requests))
    assert VllmCore(engine, "wakeup").known_requests() == 2


def test_the_client_knows_its_requests_and_which_core_has_them() -> None:
    assert "self.request_states" in source(OutputProcessor.__init__)
    chosen = source(DPLBAsyncMPClient.get_core_engine_for_request)
    assert "self.reqs_in_flight[request.request_id] = chosen_engine" in chosen
    one, two = b"\0\0", b"\1\0"
    processor = SimpleNamespace(request_states={"a": 1, "b": 2, "c": 3})
    core = SimpleNamespace(core_engines=[one])
    client = SimpleNamespace(output_processor=processor, engine_core=core)
    assert unfinished_by_core(client) == [3]
    core.core_engines = [one, two]
    # "d" was aborted: the core has not answered that yet. "c" has not been sent yet.
    core.reqs_in_flight = {"a": two, "b": two, "d": one}
    assert unfinished_by_core(client) == [0, 2]
