"""How the gate chooses the nonces of a forward by the time that chat may wait, on a fake core."""

from concurrent.futures import Future
from typing import Any

import pytest

from engines.fake_core import STEP_S, Block, FakeCore, call, gate_on
from proofserve.engines.vllm.core_messages import values_of
from proofserve.engines.vllm.forwards import AIM, MOST_NONCES, TRIES

BOUND_S = 0.25


def spin_until_answered(core: FakeCore, answer: "Future[dict[str, Any]]") -> None:
    for _ in range(1000):
        if answer.done():
            return
        core.spin()
    raise AssertionError("not answered after 1000 passes of the loop")


def spin_and_wake(core: FakeCore, answer: "Future[dict[str, Any]]") -> None:
    """The same with a wakeup every tenth of a second."""
    woken = core.now
    for _ in range(10_000):
        if answer.done():
            return
        core.spin()
        if core.now - woken > 0.1:
            woken = core.now
            core.gate.wake_if_needed()
    raise AssertionError("not answered after 10,000 passes of the loop")


def chosen_on(core: FakeCore, **shape: int) -> int:
    """The nonces that the gate finds; ``core`` has no other gate."""
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    spin_until_answered(core, gate.prove(call(range(3), **shape)))
    return int(gate.gauges()["forward_nonces"])


@pytest.mark.parametrize(
    ("nonce_s", "nonces"),
    [(0.001, MOST_NONCES), (0.01, 16), (0.02, 8), (0.06, 2), (0.09, 2), (0.11, 1), (3.0, 1)],
)
def test_the_largest_power_of_two_that_fits_is_chosen(nonce_s: float, nonces: int) -> None:
    core = FakeCore()
    core.forward_s = lambda count: nonce_s * count
    assert chosen_on(core) == nonces
    assert list(map(len, core.forwards))[: TRIES + 1] == [*[1] * TRIES, nonces]
    assert nonces == 1 or nonces * nonce_s <= AIM * BOUND_S


@pytest.mark.parametrize("nonce_s", [0.001, 0.02, 0.07, 0.3, 0.6])
def test_no_part_takes_longer_than_chat_may_wait_and_few_are_made(nonce_s: float) -> None:
    core = FakeCore()
    core.deep = 20
    core.forward_s = lambda count: 0.01 + nonce_s * count
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    core.free = [Block(number) for number in range(1000)]
    spin_until_answered(core, gate.prove(call(range(96))))
    times = [
        core.forward_s(len(nonces)) * (end - first) / core.deep
        for nonces, (first, end) in zip(core.forwards, core.parts, strict=True)
    ]
    assert max(times) <= BOUND_S
    assert gate.gauges()["part_s"] <= AIM * BOUND_S
    # Only a forward of which one layer is too long for all 32 nonces has fewer.
    fewer = {0.3: 8, 0.6: 4}
    assert gate.gauges()["forward_nonces"] == fewer.get(nonce_s, MOST_NONCES)
    newest = core.forward_s(int(gate.gauges()["forward_nonces"]))
    assert core.parts[-1][1] - core.parts[-1][0] <= max(1, AIM * BOUND_S * core.deep / newest)


def test_chat_steps_between_the_parts_of_a_forward() -> None:
    core = FakeCore()
    core.deep = 4
    core.forward_s = lambda _count: 0.8
    gate = gate_on(core, max_wait_s=BOUND_S)
    core.chat("chat", steps=2, at=0.3)
    answer = gate.prove(call(range(4)))
    spin_until_answered(core, answer)
    assert core.events == ["forward", "forward", "step", "step", "forward", "forward"]
    assert core.parts == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert values_of(answer.result())[:, 0].tolist() == [0, 1, 2, 3]
    assert gate.gauges()["longest_chat_wait_s"] == pytest.approx(0.1)


def test_forwards_follow_a_machine_that_becomes_slower_and_keep_their_nonces() -> None:
    core = FakeCore()
    core.deep = 10
    core.forward_s = lambda count: 0.01 * count
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    core.free = [Block(number) for number in range(1000)]
    spin_until_answered(core, gate.prove(call(range(64))))
    assert core.parts[-1] == (6, 10)
    core.forward_s = lambda count: 0.05 * count
    spin_until_answered(core, gate.prove(call(range(640), defer_s=1e6)))
    assert core.parts[-1] == (9, 10)
    assert {len(nonces) for nonces in core.forwards[20:]} == {MOST_NONCES}


def test_a_model_that_cannot_pause_has_fewer_nonces_and_runs_whole() -> None:
    core = FakeCore()
    core.deep, core.can_pause = 10, False
    core.forward_s = lambda count: 0.03 * count
    assert chosen_on(core) == 4
    assert core.parts[-1] == (0, 10)


def test_a_call_that_ends_in_the_middle_of_a_forward_leaves_nothing_to_the_next() -> None:
    core = FakeCore()
    core.deep = 4
    core.forward_s = lambda _count: 0.8
    gate = gate_on(core)
    gate.prove(call(range(4)))
    core.spin(2)
    gate.release("lease")
    answer = gate.prove(call(range(4, 8), lease="next"))
    spin_until_answered(core, answer)
    assert core.parts[2:] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert values_of(answer.result())[:, 0].tolist() == [4, 5, 6, 7]


def test_a_forward_that_chat_interrupts_for_longer_than_a_call_may_take_goes_on() -> None:
    core = FakeCore()
    core.deep = 8
    core.forward_s = lambda _count: 1.6
    gate = gate_on(core)
    asked, proved = 0, list[float]()
    # Chat leaves time for one part of 0.2 s, and has the engine for 0.5 s.
    for number in range(300):
        core.chat(f"chat {number}", steps=50, at=0.1 + 0.75 * number)
    while core.now < 100.0:
        answer = gate.prove(call(range(8)[len(proved) :], defer_s=1.0))
        asked += 1
        spin_and_wake(core, answer)
        if answer.result()["kind"] == "proved":
            proved += values_of(answer.result())[:, 0].tolist()
        if len(proved) == 8:
            break
    assert proved == list(range(8))
    assert asked > 4
    # No layer of the two forwards ran twice, once their parts were known to be one layer each.
    assert core.parts == [(layer, layer + 1) for layer in range(8)] * 2


def test_of_two_calls_the_one_whose_forward_was_interrupted_goes_on() -> None:
    core = FakeCore()
    core.deep = 8
    core.forward_s = lambda _count: 1.6
    gate = gate_on(core)
    for number in range(200):
        core.chat(f"chat {number}", steps=50, at=0.1 + 0.75 * number)
    left = {"first": list(range(8)), "second": list(range(8, 16))}
    asked = {"first": gate.prove(call(left["first"], defer_s=1.0))}
    # So the second one ends half a second after the first one.
    core.pass_time(0.5)
    asked["second"] = gate.prove(call(left["second"], defer_s=1.0))
    woken = 0.0
    while asked and core.now < 100.0:
        core.spin()
        if core.now - woken > 0.1:
            woken = core.now
            gate.wake_if_needed()
        for name, answer in list(asked.items()):
            if not answer.done():
                continue
            if answer.result()["kind"] == "proved":
                left[name] = left[name][len(values_of(answer.result())) :]
            del asked[name]
            if left[name]:
                asked[name] = gate.prove(call(left[name], defer_s=1.0))
    assert left == {"first": [], "second": []}
    assert core.parts == [(layer, layer + 1) for layer in range(8)] * 4


def test_a_call_that_takes_too_long_ends_between_two_forwards() -> None:
    core = FakeCore()
    core.deep = 4
    core.forward_s = lambda _count: 0.8
    gate = gate_on(core, forward_batch=2)
    # The second call waits for the first one, and is late when it begins.
    answers = [gate.prove(call(range(6), defer_s=1.0)), gate.prove(call(range(6, 12), defer_s=1.0))]
    proved = list[float]()
    for answer in answers:
        spin_and_wake(core, answer)
        proved += values_of(answer.result())[:, 0].tolist()
    assert proved == [0, 1, 2, 3, 6, 7]
    assert core.parts == [(layer, layer + 1) for layer in range(4)] * 3


def test_a_measured_forward_that_chat_interrupts_goes_on_with_the_next_call() -> None:
    core = FakeCore()
    core.deep = 8
    core.forward_s = lambda _count: 1.6
    gate = gate_on(core, forward_batch=None)
    for number in range(200):
        core.chat(f"chat {number}", steps=50, at=0.1 + 0.75 * number)
    answer = gate.prove(call([7], defer_s=1.0))
    spin_and_wake(core, answer)
    while answer.result()["kind"] == "deferred" and core.now < 100.0:
        answer = gate.prove(call([7], defer_s=1.0))
        spin_and_wake(core, answer)
    assert values_of(answer.result())[:, 0].tolist() == [7]
    assert core.parts == [(layer, layer + 1) for layer in range(8)] * (TRIES + 1)


def test_a_forward_that_another_call_came_between_begins_again() -> None:
    core = FakeCore()
    core.deep = 4
    core.forward_s = lambda _count: 0.8
    gate = gate_on(core)
    core.chat("chat", steps=120, at=0.3)
    deferred = gate.prove(call(range(4), defer_s=0.5))
    spin_and_wake(core, deferred)
    assert deferred.result()["kind"] == "deferred"
    assert core.parts == [(0, 1), (1, 2)]
    others = gate.prove(call(range(4, 8), lease="other"))
    spin_until_answered(core, others)
    answer = gate.prove(call(range(4)))
    spin_until_answered(core, answer)
    assert core.parts[2:] == [(layer, layer + 1) for layer in range(4)] * 2
    assert values_of(others.result())[:, 0].tolist() == [4, 5, 6, 7]


def test_a_first_forward_that_prepares_kernels_does_not_count() -> None:
    core = FakeCore()
    core.forward_s = lambda count: 1.0 if len(core.forwards) == 1 else 0.01 * count
    assert chosen_on(core) == 16


def test_a_forward_has_no_more_nonces_than_a_step_of_the_engine_holds() -> None:
    core = FakeCore()
    core.forward_s = lambda _count: 0.001
    core.free = [Block(number) for number in range(1000)]
    # A step of the fake core holds 4096 tokens.
    assert chosen_on(core, seq_len=400, sequences_per_nonce=2) == 5


def test_without_room_for_more_kv_blocks_the_size_stays_below() -> None:
    core = FakeCore()
    core.forward_s = lambda _count: 0.001
    # Two blocks a nonce; 32 nonces would need 64.
    core.take_blocks(core.free_blocks() - 20)
    assert chosen_on(core) == 8
    assert core.free_blocks() == 20 - 16


def test_chat_that_arrives_while_sizes_are_measured_waits_for_one_forward() -> None:
    core = FakeCore()
    core.forward_s = lambda count: 0.02 * count
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    core.chat("chat", steps=1, at=0.03)
    answer = gate.prove(call(range(3)))
    core.spin(2)
    assert core.events == ["forward", "forward", "step"]
    spin_until_answered(core, answer)
    assert gate.gauges()["longest_chat_wait_s"] == pytest.approx(0.01)


def test_the_size_of_a_shape_is_kept_until_a_round_begins() -> None:
    core = FakeCore()
    core.forward_s = lambda count: 0.02 * count
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    spin_until_answered(core, gate.prove(call(range(3))))
    core.forward_s = lambda count: 0.09 * count
    core.forwards.clear()
    spin_until_answered(core, gate.prove(call(range(8, 16), lease="job")))
    assert core.forwards == [tuple(range(8, 16))]
    # What begins a round: a call without nonces.
    begun = gate.prove(call((), lease="fit", defer_s=0.0))
    spin_until_answered(core, begun)
    assert values_of(begun.result()).size == 0
    assert gate.gauges()["forward_nonces"] == 2
    assert gate.gauges()["forward_s"] == pytest.approx(0.18)
    core.forwards.clear()
    spin_until_answered(core, gate.prove(call(range(4), lease="round")))
    assert core.forwards == [(0, 1), (2, 3)]


def test_a_round_that_begins_beside_chat_is_not_held_up() -> None:
    core = FakeCore()
    gate = gate_on(core, forward_batch=None)
    core.chat("chat", steps=10)
    core.spin()
    begun = gate.prove(call((), defer_s=0.0))
    assert begun.result(timeout=0)["kind"] == "deferred"
    assert core.now == STEP_S


def test_each_scheme_and_length_has_a_size_of_its_own() -> None:
    core = FakeCore()
    core.forward_s = lambda count: 0.02 * count
    gate = gate_on(core, forward_batch=None, max_wait_s=BOUND_S)
    spin_until_answered(core, gate.prove(call(range(3))))
    core.forwards.clear()
    spin_until_answered(core, gate.prove(call(range(3), lease="long", seq_len=64)))
    assert list(map(len, core.forwards)) == [*[1] * TRIES, 8]


def test_a_fixed_size_is_not_measured() -> None:
    core = FakeCore()
    gate = gate_on(core, forward_batch=6)
    begun = gate.prove(call((), defer_s=0.0))
    spin_until_answered(core, begun)
    spin_until_answered(core, gate.prove(call(range(3))))
    assert list(map(len, core.forwards)) == [6]
    assert gate.gauges()["forward_nonces"] == 6


def test_one_nonce_that_the_pool_cannot_hold_is_a_fault() -> None:
    core = FakeCore()
    core.take_blocks(core.free_blocks() - 1)
    answer = gate_on(core, forward_batch=None).prove(call(range(3)))
    core.spin()
    assert "needs 2 KV blocks, 1 are free" in answer.result(timeout=0)["error"]
