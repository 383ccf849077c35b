"""When the gate lets proofs run, on a fake core and a fake clock: no vLLM is started."""

import os
import subprocess
import sys
from concurrent.futures import Future
from typing import Any

import pytest

from engines.fake_core import FORWARD_S, STEP_S, FakeCore, call, gate_on
from proofserve.engines.vllm.core_gate import CHAT_GRACE_S, WAKEUP_S, wake_until_orphaned
from proofserve.engines.vllm.core_messages import FAULT, values_of


def nonces_of(future: "Future[dict[str, Any]]") -> list[int]:
    """The nonces that a completed call proved: the fake core writes them into the rows."""
    reply = future.result(timeout=0)
    assert reply["kind"] == "proved"
    return [int(row[0]) for row in values_of(reply)]


def test_these_tests_need_no_vllm() -> None:
    program = "import sys, engines.fake_core; sys.exit('vllm' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": "tests"}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=False).returncode == 0


def test_a_call_runs_in_forwards_of_one_shape_and_is_answered_once_it_is_whole() -> None:
    core = FakeCore()
    answer = gate_on(core).prove(call(range(6)))
    core.spin()
    assert not answer.done()
    core.spin()
    assert core.forwards == [(0, 1, 2, 3), (4, 5, -1, -2)]
    assert nonces_of(answer) == [0, 1, 2, 3, 4, 5]


def test_a_forward_counts_nonces_and_leases_two_sequences_for_each_of_two() -> None:
    core = FakeCore()
    gate = gate_on(core, forward_batch=2)
    answer = gate.prove(call(range(3), sequences_per_nonce=2))
    core.spin(2)
    assert core.forwards == [(0, 1), (2, -1)]
    assert nonces_of(answer) == [0, 1, 2]
    # Two nonces of two sequences of 32 tokens, in blocks of 16.
    assert gate.gauges()["leased_blocks"] == 8


def test_a_step_too_small_for_one_nonce_is_a_fault_that_says_what_to_change() -> None:
    core = FakeCore()
    # A step of the fake core holds 4096 tokens.
    answer = gate_on(core).prove(call(range(3), seq_len=4096, sequences_per_nonce=2))
    core.spin()
    reply = answer.result(timeout=0)
    assert reply["kind"] == "fault"
    assert "--max-num-batched-tokens" in reply["error"]
    assert core.forwards == []


def test_without_chat_the_first_forward_starts_at_once() -> None:
    core = FakeCore()
    gate_on(core).prove(call(range(4)))
    core.spin()
    assert core.now == FORWARD_S


def test_after_chat_a_forward_waits_for_the_grace() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.chat("chat", steps=1)
    core.spin()
    answer = gate.prove(call(range(4)))
    core.spin(2)
    assert core.now == pytest.approx(STEP_S + CHAT_GRACE_S + FORWARD_S, abs=1e-5)
    assert answer.done()


def test_a_chat_request_that_arrives_in_the_grace_is_served_before_the_forward() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.chat("first", steps=1)
    core.chat("second", steps=1, at=STEP_S + CHAT_GRACE_S / 2)
    core.spin()
    gate.prove(call(range(4)))
    core.spin(2)
    assert core.events == ["step", "step", "forward"]
    assert gate.gauges()["longest_chat_wait_s"] == 0


def test_a_message_that_is_no_chat_does_not_cut_the_grace_short() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.chat("chat", steps=1)
    core.spin()
    gate.prove(call(range(4)))
    core.post_wakeup()
    core.spin()
    assert core.events == ["step"]
    core.spin()
    assert core.events == ["step", "forward"]


def test_a_chat_request_that_arrives_during_a_forward_waits_for_that_forward_alone() -> None:
    core = FakeCore()
    gate = gate_on(core)
    gate.prove(call(range(12)))
    core.chat("chat", steps=2, at=FORWARD_S / 4)
    core.spin(3)
    assert core.events == ["forward", "step", "step", "forward"]
    gauges = gate.gauges()
    assert gauges["longest_chat_wait_s"] == pytest.approx(FORWARD_S * 3 / 4)
    assert gauges["longest_chat_wait_batches"] == pytest.approx(3 / 4)
    assert core.waits == [("chat", pytest.approx(FORWARD_S / 4), pytest.approx(FORWARD_S))]


def test_under_endless_chat_proofs_never_run() -> None:
    core = FakeCore()
    gate_on(core).prove(call(range(4)))
    core.chat("chat", steps=100)
    core.spin(100)
    # The chat request was in the queue before the core became idle for the first time.
    assert core.events == ["step"] * 100


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_under_endless_chat_proofs_take_their_share_and_no_more(share: float) -> None:
    core = FakeCore()
    gate = gate_on(core, share=share)
    core.chat("chat", steps=10_000)
    core.spin()
    gate.prove(call(range(4000)))
    core.spin(1000)
    busy = core.events.count("forward") * FORWARD_S
    assert busy / core.now == pytest.approx(share, abs=0.02)


def test_a_call_that_may_not_wait_is_deferred_at_once_while_chat_runs() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.chat("chat", steps=10)
    core.spin()
    assert gate.prove(call(range(4), defer_s=0.0)).result(timeout=0)["kind"] == "deferred"
    assert core.forwards == []


def test_an_overdue_call_is_deferred_by_the_next_wakeup() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.chat("chat", steps=1000)
    core.spin()
    answer = gate.prove(call(range(4), defer_s=1.0))
    while core.now < 1.0:
        core.spin()
        gate.wake_if_needed()
    assert not answer.done()
    for _ in range(4):
        core.spin()
        gate.wake_if_needed()
    reply = answer.result(timeout=0)
    assert reply["kind"] == "deferred"
    assert reply["seconds"] == pytest.approx(1.0, abs=4 * STEP_S)
    assert core.forwards == []


def test_an_overdue_call_is_answered_with_its_finished_part() -> None:
    core = FakeCore()
    gate = gate_on(core)
    answer = gate.prove(call(range(12), defer_s=1.0))
    core.chat("chat", steps=1000, at=FORWARD_S / 2)
    while core.now < 1.0 + 2 * STEP_S:
        core.spin()
        gate.wake_if_needed()
    assert nonces_of(answer) == [0, 1, 2, 3]


def test_an_overdue_call_stays_in_the_queue_when_chat_is_idle() -> None:
    core = FakeCore()
    gate = gate_on(core)
    first = gate.prove(call(range(4)))
    second = gate.prove(call([7], defer_s=FORWARD_S / 2))
    core.spin(2)
    assert nonces_of(first) == [0, 1, 2, 3]
    assert nonces_of(second) == [7]


def test_a_released_lease_takes_its_calls_out_of_the_queue_and_no_others() -> None:
    core = FakeCore()
    gate = gate_on(core)
    started = gate.prove(call(range(12), lease="a"))
    other = gate.prove(call([50], lease="b"))
    waiting = gate.prove(call([60], lease="a"))
    core.spin()
    assert gate.gauges()["leased_blocks"] > 0
    gate.release("a")
    assert gate.gauges()["leased_blocks"] == 0
    for answer in (started, waiting):
        assert "the lease was returned" in answer.result(timeout=0)["error"]
    core.spin(3)
    assert nonces_of(other) == [50]
    assert len(core.forwards) == 2


def test_a_lease_that_no_call_uses_goes_back_to_the_pool() -> None:
    core = FakeCore()
    gate = gate_on(core, lease_idle_s=30.0)
    gate.prove(call(range(4)))
    core.spin()
    core.pass_time(29.0)
    gate.wake_if_needed()
    core.spin()
    assert core.free_blocks() == 100 - 4 * 2
    core.pass_time(2.0)
    gate.wake_if_needed()
    core.spin()
    assert core.free_blocks() == 100


def test_a_lease_of_a_call_that_waits_for_chat_is_kept() -> None:
    core = FakeCore()
    gate = gate_on(core, lease_idle_s=1.0)
    gate.prove(call(range(12), defer_s=1e6))
    core.chat("chat", steps=1000, at=FORWARD_S / 2)
    while core.now < 3.0:
        core.spin()
        gate.wake_if_needed()
    assert core.free_blocks() == 100 - 4 * 2


def test_nothing_wakes_the_loop_when_no_call_waits_and_no_lease_is_out() -> None:
    core = FakeCore()
    gate = gate_on(core)
    gate.prove(call(range(4)))
    core.spin()
    gate.release("lease")
    before = core.wakeups
    gate.wake_if_needed()
    assert core.wakeups == before


def test_a_failed_forward_answers_its_call_alone_and_returns_its_lease() -> None:
    core = FakeCore()
    gate = gate_on(core)
    core.broken_forwards[1] = RuntimeError("out of memory")
    failing = gate.prove(call(range(8), lease="a"))
    next_one = gate.prove(call([50], lease="b"))
    core.spin(2)
    assert failing.result(timeout=0) == {"kind": "fault", "error": "RuntimeError: out of memory"}
    assert core.free_blocks() == 100
    core.spin()
    assert nonces_of(next_one) == [50]


def test_a_forward_that_the_pool_cannot_hold_is_a_fault_that_says_what_to_change() -> None:
    core = FakeCore()
    answer = gate_on(core, forward_batch=60).prove(call([1]))
    core.spin()
    assert "needs 120 KV blocks, 100 are free" in answer.result(timeout=0)["error"]
    assert "--poc-forward-batch" in answer.result(timeout=0)["error"]


def test_a_core_without_a_loop_runs_a_call_whole_or_defers_it() -> None:
    core = FakeCore(own_loop=False)
    gate = gate_on(core)
    assert nonces_of(gate.prove(call(range(6)))) == list(range(6))
    core.unfinished = {"chat": 1}
    assert gate.prove(call(range(6))).result(timeout=0)["kind"] == "deferred"
    assert len(core.forwards) == 2


def test_measure_counts_bare_forwards_and_returns_its_lease() -> None:
    core = FakeCore()
    measured = gate_on(core).measure(call(range(4)), forwards=3)
    core.spin()
    assert measured.result(timeout=0) == {"seconds": pytest.approx(3 * FORWARD_S), "nonces": 12}
    assert core.free_blocks() == 100


def test_wakeups_go_on_until_the_process_has_lost_its_parent() -> None:
    parents = iter([100, 100, 100, 1])
    slept: list[float] = []
    woken: list[int] = []
    wake_until_orphaned(lambda: woken.append(len(slept)), lambda: next(parents), slept.append)
    assert slept == [WAKEUP_S, WAKEUP_S]
    assert woken == [1, 2]


def test_the_next_owner_ends_the_calls_and_leases_of_the_last_one() -> None:
    core = FakeCore()
    gate = gate_on(core)
    blocks = len(core.free)
    running, waiting = gate.prove(call(range(8), "first")), gate.prove(call(range(4), "second"))
    core.spin()
    assert len(core.free) < blocks
    gate.take_over()
    assert len(core.free) == blocks
    for future in (running, waiting):
        assert future.result(0)["kind"] == FAULT
        assert "another API process" in future.result(0)["error"]
    mine = gate.prove(call(range(4), "third"))
    core.spin(4)
    assert mine.result(0)["done"] == 4
    gate.take_over()
    gate.release("third")
    assert len(core.free) == blocks
