"""How much engine time the gate gives proofs beside endless chat, on a fake core and clock."""

from collections.abc import Callable

import pytest

from engines.fake_core import FORWARD_S, STEP_S, FakeCore, call, gate_on
from proofserve.engines.vllm.core_gate import CHAT_GRACE_S
from proofserve.engines.vllm.core_times import EARNED_S

SHARES = pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
# More steps and nonces than any test here comes to.
ENDLESS = 1_000_000
ENDLESS_CALL = call(range(100_000), defer_s=1e6)


def share_while(core: FakeCore, seconds: float, between: Callable[[], None] | None = None) -> float:
    """Fraction of the next ``seconds`` that forwards took; ``between`` runs before each pass."""
    began, before = core.now, core.events.count("forward")
    while core.now < began + seconds:
        if between is not None:
            between()
        last = core.now
        core.spin()
        assert core.now > last, "neither chat nor a proof ran"
    return (core.events.count("forward") - before) * FORWARD_S / (core.now - began)


@SHARES
def test_chat_that_ran_before_the_round_earns_proofs_nothing(share: float) -> None:
    core = FakeCore()
    gate = gate_on(core, share=share)
    core.chat("chat", steps=ENDLESS)
    core.spin(60_000)
    assert core.now == pytest.approx(600)
    gate.prove(ENDLESS_CALL)
    assert share_while(core, 20.0) == pytest.approx(share, abs=0.02)


@SHARES
def test_rounds_in_turns_with_none_keep_the_share_while_they_run(share: float) -> None:
    core = FakeCore()
    gate = gate_on(core, share=share)
    core.chat("chat", steps=ENDLESS)
    core.spin()
    shares = []
    for _ in range(20):
        gate.prove(ENDLESS_CALL)
        shares.append(share_while(core, 5.3))
        gate.release("lease")
        assert share_while(core, 5.3) == 0
    assert sum(shares) / 20 == pytest.approx(share, abs=0.01)


@SHARES
def test_pauses_of_chat_shorter_than_the_grace_do_not_raise_the_share(share: float) -> None:
    core = FakeCore()
    gate = gate_on(core, share=share)
    sent = 0

    def next_chat() -> None:
        nonlocal sent
        if not core.is_busy():
            sent += 1
            core.chat(f"chat {sent}", steps=3, at=core.now + CHAT_GRACE_S / 2)

    next_chat()
    core.spin()
    gate.prove(ENDLESS_CALL)
    assert share_while(core, 50.0, next_chat) == pytest.approx(share, abs=0.02)


def test_a_forward_holds_no_tokens_back_that_chat_has_already_computed() -> None:
    core = FakeCore()
    gate = gate_on(core, share=0.5)
    core.chat("chat", steps=100)
    core.spin()
    gate.prove(ENDLESS_CALL)
    core.spin(99)
    assert core.events.count("forward") >= 9
    assert max(core.held_back) == 0
    assert len(core.delays) == core.events.count("forward")
    assert {round(end - start, 6) for start, end in core.delays} == {FORWARD_S}


def test_forwards_that_ran_while_chat_was_idle_are_not_charged() -> None:
    core = FakeCore()
    gate = gate_on(core, share=0.2)
    gate.prove(ENDLESS_CALL)
    assert share_while(core, 10.0) == pytest.approx(1.0)
    core.chat("chat", steps=ENDLESS)
    core.spin()
    assert share_while(core, 20.0) == pytest.approx(0.2, abs=0.02)


def test_time_without_a_waiting_proof_earns_nothing_even_if_no_chat_step_ends_it() -> None:
    core = FakeCore()
    gate = gate_on(core, share=0.2)
    core.chat("chat", steps=20)
    core.spin()
    gate.prove(ENDLESS_CALL)
    core.spin(10)
    gate.release("lease")
    core.spin(20)
    core.pass_time(3600)
    # The call reaches the core together with chat, before it could see that chat had paused.
    core.chat("late", steps=ENDLESS)
    gate.prove(ENDLESS_CALL)
    core.spin()
    assert share_while(core, 10.0) == pytest.approx(0.2, abs=0.02)


def test_what_long_steps_earn_is_spent_later_but_only_so_much_of_it() -> None:
    """A forward after each step is the most there is: under short forwards credit piles up."""
    core = FakeCore()
    gate = gate_on(core, share=0.5)
    core.chat("chat", steps=ENDLESS)
    core.spin()
    gate.prove(ENDLESS_CALL)
    long_step = 3 * FORWARD_S

    def slow_down() -> None:
        # A step of ``STEP_S`` and this pause are one long step: no forward may run within it.
        core.pass_time(long_step - STEP_S)

    assert share_while(core, 60.0, slow_down) == pytest.approx(0.25, abs=0.01)
    # Beyond the share, at most what the cap holds.
    excess = (share_while(core, 30.0) - 0.5) * 30.0
    assert FORWARD_S < excess <= 0.5 * EARNED_S + FORWARD_S
