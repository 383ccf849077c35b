"""Chat that never pauses, with and without a round beside it."""

import itertools
import time
from dataclasses import dataclass, field

from proofserve.lab.chats import uneven_chat
from proofserve.lab.figures import median
from proofserve.lab.load import Call, closed_loop, tokens_between
from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import NodeStatus, Work
from proofserve.lab.telling import Progress
from proofserve.lab.waiting import computing_round, wait_until

# Until every client has its first request in a running batch.
SETTLE_S = 1.5
AFTERWARDS_S = 30.0


@dataclass(frozen=True, slots=True)
class Load:
    """``clients`` chats in flight, each about ``tokens`` long, ``pairs`` windows each way.

    Many and long, so that the engine has work even when the API process falls behind.
    """

    clients: int = 32
    tokens: int = 256
    window_s: float = 10.0
    pairs: int = 3


@dataclass(slots=True)
class Saturation:
    """Chat tokens per second of each window; proofs stored in the windows, and once they ended.

    ``chat_share`` is the fraction of each window beside a round in which chat held the engine. Far
    below 1, the engine had idle moments (a starved API process, say), and proofs may use those.
    """

    plain: list[float] = field(default_factory=list)
    beside_round: list[float] = field(default_factory=list)
    chat_share: list[float] = field(default_factory=list)
    proofs_while_saturated: int = 0
    proofs_afterwards: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def throughput_ratio(self) -> float | None:
        """With a round over without: the median over pairs of windows next to each other."""
        pairs = zip(self.beside_round, self.plain, strict=True)
        return median([with_round / plain for with_round, plain in pairs])


def measure_saturation(node: NodeClient, work: Work, load: Load, progress: Progress) -> Saturation:
    """Windows in turns, each pair the other way round, so that drift of the machine cancels."""
    bench = _Bench(node, work, load)
    for pair in range(load.pairs):
        progress.step(
            f"saturating chat, windows {2 * pair + 1} and {2 * pair + 2} of {2 * load.pairs}", 2
        )
        order = (bench.plain_window, bench.round_window)
        for window in order if pair % 2 == 0 else order[::-1]:
            window()
            progress.advance()
    return bench.read


@dataclass(frozen=True, slots=True)
class _Window:
    """``deferred_share``: the fraction of the time in which chat held a waiting proof back."""

    tokens_per_s: float
    proofs: int
    deferred_share: float


def _deferred_s(status: NodeStatus) -> float:
    return status.engine.deferred_s if status.engine else 0.0


class _Bench:
    """Runs the windows and keeps what they gave."""

    def __init__(self, node: NodeClient, work: Work, load: Load) -> None:
        self.read = Saturation()
        self._node = node
        self._work = work
        self._load = load
        # Every window's chats are new, or the prefix cache would know them.
        self._numbers = itertools.count()

    def plain_window(self) -> None:
        """Chat alone."""
        self.read.plain.append(self._window().tokens_per_s)

    def round_window(self) -> None:
        """Chat beside a round; then the round by itself, which must get on again."""
        with computing_round(self._node, self._work):
            window = self._window()
            self.read.beside_round.append(window.tokens_per_s)
            self.read.chat_share.append(window.deferred_share)
            self.read.proofs_while_saturated += window.proofs
            self.read.proofs_afterwards += self._resumed()

    def _window(self) -> "_Window":
        """What happens in the steady part of the load."""
        load = self._load

        def call(_number: int) -> Call:
            return uneven_chat(self._work.model, next(self._numbers), load.tokens)

        with closed_loop(self._node.url, call, load.clients) as loop:
            time.sleep(SETTLE_S)
            before, began = self._node.status(), time.monotonic()
            time.sleep(load.window_s)
            after, ended = self._node.status(), time.monotonic()
        self.read.errors.extend(reply.error for reply in loop.replies if reply.error)
        tokens = tokens_between(loop.replies, began, ended, lambda r: r.completion_tokens)
        seconds = ended - began
        return _Window(
            tokens_per_s=tokens / seconds,
            proofs=after.processed - before.processed,
            deferred_share=(_deferred_s(after) - _deferred_s(before)) / seconds,
        )

    def _resumed(self) -> int:
        """Proofs that the round stores once chat has ended."""
        before = self._node.status().processed
        wait_until(
            lambda: self._node.status().processed > before, "proofs after chat", AFTERWARDS_S
        )
        return self._node.status().processed - before
