"""An engine core without vLLM: its loop, its message queue and its block pool, on a fake clock."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from proofserve.engines.vllm.core_gate import ProofGate
from proofserve.engines.vllm.core_messages import Forward, ProveCall, proved

STEP_S = 0.01
FORWARD_S = 0.1
WIDTH = 4
# A wait takes this much longer than asked, as a real one does, in seconds.
WAIT_EXCESS_S = 1e-6


@dataclass(frozen=True)
class Block:
    block_id: int


class FakeCore:
    """A ``VllmCore`` without vLLM. ``spin`` is one pass of the loop.

    Only steps, forwards and waits take time.
    A chat request is a name and a number of steps. It reaches the message queue at its arrival
    time, during whatever the loop does then.
    """

    def __init__(self, own_loop: bool = True) -> None:
        self.now = 0.0
        self.forwards: list[tuple[int, ...]] = []
        self.broken_forwards: dict[int, Exception] = {}
        """Errors by the number of the forward that raises them; the first forward is 0."""
        self.forward_s: Callable[[int], float] = lambda _nonces: FORWARD_S
        """How long a forward of so many nonces takes, in seconds."""
        self.deep, self.can_pause = 1, True
        """Layers of the model, and whether a forward can pause between them."""
        self.parts: list[tuple[int, int]] = []
        """The layers of every forward or part of one."""
        self.free = [Block(i) for i in range(100)]
        self.wakeups = 0
        self.events: list[str] = []
        """Steps and forwards in order."""
        self.held_back: list[float] = []
        """Seconds from the end of each step until its tokens left for the API process."""
        self.unfinished: dict[str, int] = {}
        self.waits: list[tuple[str, float, float]] = []
        """Requests that waited for a part of a forward, from when to when."""
        self.delays: list[tuple[float, float]] = []
        """When all requests waited between two of their steps."""
        self._own_loop = own_loop
        self._messages: deque[str] = deque()
        self._steps: dict[str, int] = {}
        self._future: list[tuple[float, str]] = []
        self._idle_callbacks: list[Callable[[], None]] = []
        self._arrived: Callable[[str], None] = lambda _name: None
        self._stepping: Callable[[], None] = lambda: None
        self._stepped: Callable[[float, float], None] = lambda _start, _end: None
        self.gate: ProofGate

    # -- what a test does ------------------------------------------------------------------------

    def chat(self, name: str, steps: int, at: float = 0.0) -> None:
        """Send a chat request that needs ``steps`` steps and arrives at the time ``at``."""
        self._steps[name] = steps
        self._future.append((at, name))
        self.pass_time(0)

    def spin(self, times: int = 1) -> None:
        for _ in range(times):
            self._spin()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [each for each in self._future if each[0] <= end]:
            first = min(due)
            self._future.remove(first)
            self.now = max(self.now, first[0])
            self._messages.append(first[1])
            self._arrived(first[1])
        self.now = end

    def _spin(self) -> None:
        if not self.unfinished:
            while self._idle_callbacks:
                self._idle_callbacks.pop()()
        while self._messages:
            name = self._messages.popleft()
            if name == "wakeup":
                self.gate.wake_up()
            else:
                self.unfinished[name] = self._steps[name]
        if self.unfinished:
            self._step()

    def _step(self) -> None:
        self._stepping()
        start = self.now
        self.events.append("step")
        self.pass_time(STEP_S)
        self.unfinished = {name: left - 1 for name, left in self.unfinished.items() if left > 1}
        end = self.now
        self._stepped(start, end)
        # As in vLLM, the loop hands tokens on when the step function has returned.
        self.held_back.append(self.now - end)

    # -- what the gate calls --------------------------------------------------------------------

    def has_own_loop(self) -> bool:
        return self._own_loop

    def is_busy(self) -> bool:
        return bool(self.unfinished) or self.waiting_requests() != []

    def unfinished_requests(self) -> int:
        return len(self.unfinished)

    def waited(self, request_id: str, start: float, end: float) -> None:
        self.waits.append((request_id, start, end))

    def delayed(self, start: float, end: float) -> None:
        self.delays.append((start, end))

    def waiting_requests(self) -> list[str]:
        return [name for name in self._messages if name != "wakeup"]

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        self._idle_callbacks.append(callback)

    def await_message(self, seconds: float) -> None:
        if self._messages:
            return
        arrivals = [at - self.now for at, _ in self._future]
        self.pass_time(min([seconds, *arrivals]) + WAIT_EXCESS_S)

    def post_wakeup(self) -> None:
        self.wakeups += 1
        self._messages.append("wakeup")

    def watch(
        self,
        arrived: Callable[[str], None],
        stepping: Callable[[], None],
        stepped: Callable[[float, float], None],
    ) -> None:
        self._arrived, self._stepping, self._stepped = arrived, stepping, stepped

    def run_forward(self, forward: Forward) -> dict[str, Any] | None:
        number = len(self.forwards)
        self.forwards.append(tuple(forward.call.nonces))
        self.parts.append((forward.first, forward.end))
        self.events.append("forward")
        share = (forward.end - forward.first) / forward.layers
        if not self.can_pause:
            share = 1.0 if forward.is_last else 0.0
        self.pass_time(self.forward_s(len(forward.call.nonces)) * share)
        if number in self.broken_forwards:
            raise self.broken_forwards[number]
        if not forward.is_last:
            return None
        rows = np.array([[nonce] * WIDTH for nonce in forward.call.nonces], dtype=np.float32)
        return proved(rows, [], len(forward.call.nonces))

    def layers(self) -> int:
        return self.deep

    def max_sequences(self, seq_len: int) -> int:
        return 4096 // seq_len

    def block_sizes(self) -> tuple[int, ...]:
        return (16,)

    def take_blocks(self, count: int) -> list[Any]:
        if count > len(self.free):
            raise ValueError
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def return_blocks(self, blocks: Sequence[Any]) -> None:
        self.free += blocks

    def free_blocks(self) -> int:
        return len(self.free)


def gate_on(
    core: FakeCore,
    forward_batch: int | None = 4,
    share: float = 0.0,
    lease_idle_s: float = 60.0,
    max_wait_s: float = 0.25,
) -> ProofGate:
    """``forward_batch``: None for as many as run within ``max_wait_s``."""
    core.gate = ProofGate(
        core,
        forward_batch=forward_batch,
        max_wait_s=max_wait_s,
        share=share,
        lease_idle_s=lease_idle_s,
        now=lambda: core.now,
    )
    return core.gate


def call(
    nonces: Sequence[int],
    lease: str = "lease",
    defer_s: float = 5.0,
    seq_len: int = 32,
    sequences_per_nonce: int = 1,
) -> ProveCall:
    return ProveCall(
        lease=lease,
        scheme={},
        sequences_per_nonce=sequences_per_nonce,
        weights_digest=None,
        token_ranges=(),
        block_hash="block",
        block_height=7,
        public_key="key",
        seq_len=seq_len,
        nonces=tuple(nonces),
        defer_s=defer_s,
    )
