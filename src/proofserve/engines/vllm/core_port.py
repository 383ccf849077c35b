"""What the gate needs of vLLM's engine core. ``compat_core.VllmCore`` is the real one."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from proofserve.engines.vllm.core_messages import Forward


class CorePort(Protocol):
    """One engine core. All methods run on the core's loop thread, except ``post_wakeup``."""

    def has_own_loop(self) -> bool:
        """Whether the core runs a loop in a process of its own; otherwise its caller steps it."""

    def is_busy(self) -> bool:
        """Whether the core has chat to step, or chat requests in its message queue."""

    def unfinished_requests(self) -> int:
        """Chat requests that the scheduler has not finished."""

    def waiting_requests(self) -> list[str]:
        """Ids of the chat requests in the core's message queue, not yet taken up by its loop."""

    def waited(self, request_id: str, start: float, end: float) -> None:
        """Note that a request in the message queue waited for proofs, in seconds of
        ``time.monotonic``.
        """

    def delayed(self, start: float, end: float) -> None:
        """The same of every request that the scheduler has not finished."""

    def call_when_idle(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, as soon as the core has no work."""

    def await_message(self, seconds: float) -> None:
        """Sleep until a message for the core arrives, at most ``seconds``."""

    def post_wakeup(self) -> None:
        """Queue a message that makes the loop call ``ProofGate.wake_up``. Thread-safe."""

    def watch(
        self,
        arrived: Callable[[str], None],
        stepping: Callable[[], None],
        stepped: Callable[[float, float], None],
    ) -> None:
        """Call ``arrived(request id)`` for each chat request, from the thread that receives it,
        ``stepping()`` before each chat step and ``stepped(start, end)`` after it, in seconds of
        ``time.monotonic``.
        """

    def run_forward(self, forward: Forward) -> dict[str, Any] | None:
        """Run ``forward`` on all workers, until they have computed it.

        A ``proved`` reply, None for a part that is not the last. Raises what a worker raised.
        """

    def layers(self) -> int:
        """Decoder layers, between which a forward may pause; 1 if it cannot."""

    def max_sequences(self, seq_len: int) -> int:
        """Sequences of ``seq_len`` tokens that fit one step of this core; may be 0."""

    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per KV block of each KV-cache group, in group order."""

    def take_blocks(self, count: int) -> list[Any]:
        """Take KV blocks (each has a ``block_id``) from chat's pool. Raises ValueError."""

    def return_blocks(self, blocks: Sequence[Any]) -> None:
        """Give blocks back to the pool."""

    def free_blocks(self) -> int:
        """Blocks that neither a request nor a lease holds."""
