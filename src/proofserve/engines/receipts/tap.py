"""On a worker: makes and keeps a sketch of each row that chose a token.

A step only starts the copy of its rows to the host. They are sorted by request later, when
answers are fetched or when many steps have gathered, so that a step waits for nothing.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from proofserve.protocol.receipts.sketches import sketches

_logger = logging.getLogger(__name__)
# Steps after which their rows are sorted by request although no answer is fetched.
MOST_STEPS = 512

# The positions int64 [n] and the rows float16 [n, k_dim] of a request, from several steps.
Part = tuple[NDArray[np.int64], NDArray[np.float16]]


# For each wanted answer its rows, None if one is missing.
Rows = list[bytes | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of one request at the ``count`` positions from ``first`` on.

    The row at a position is the state that chose the token at the next one.
    """

    request_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The last row of each request in a step, one for each of ``ids``.

    ``states`` gives them as [n, hidden_size] on the device: the final norm's output, from which
    the logits were made. The row at a position chooses the token at the next one. The last row of
    an unfinished part of a prompt chooses none.
    """

    ids: list[str]
    positions: NDArray[np.int64]
    states: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """``rows`` are float16 [n, k_dim] on the host; valid once ``copied`` has happened."""

    ids: list[str]
    positions: NDArray[np.int64]
    rows: torch.Tensor
    copied: torch.cuda.Event | None


class Tap:
    """The rows of requests by position, until their request has ended; at most ``most_rows``.

    ``projection`` is float32 [k_dim, hidden_size], by ``ReceiptScheme.rows``.
    """

    def __init__(self, projection: torch.Tensor, most_rows: int) -> None:
        self._projection = projection
        self._most_rows = most_rows
        self._steps: deque[Step] = deque()
        self._parts: dict[str, list[Part]] = {}
        # Rows in the steps, and in the parts.
        self._rows = 0
        self._lost: set[str] = set()
        self._failed = False

    def take(self, sampled: SampledRows) -> None:
        """Keep the rows of a step. After an error the answers under way have no sketches."""
        if not sampled.ids:
            return
        try:
            self._add(sampled)
        except Exception:
            # An error here would end the engine, and chat with it.
            self._lose(sampled.ids)
            if not self._failed:
                _logger.exception("sketches of a step failed; its answers get no receipt")
            self._failed = True

    def fetch(self, wanted: Sequence[Wanted], alive: Collection[str]) -> Rows:
        """The rows of each of ``wanted``, None if one is missing; afterwards they are gone.

        So are the rows of all requests that are not ``alive``.
        """
        self._sort(wait=False)
        found = [self._read(each) for each in wanted]
        if self._steps and None in found:
            self._sort(wait=True)
            found = [self._read(each) for each in wanted]
        known = set(alive)
        self._forget([name for name in self._parts if name not in known])
        self._lost &= known
        return found

    @torch.inference_mode()
    def _add(self, sampled: SampledRows) -> None:
        count = len(sampled.ids)
        if self._rows + count > self._most_rows:
            self._lose(sampled.ids)
            return
        rows = sketches(sampled.states(), self._projection).to(torch.float16)
        copied: torch.cuda.Event | None = None
        if rows.is_cuda:
            host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            rows = host.copy_(rows, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._steps.append(Step(sampled.ids, sampled.positions, rows, copied))
        self._rows += count
        if len(self._steps) >= MOST_STEPS:
            self._sort(wait=False)

    def _lose(self, ids: Sequence[str]) -> None:
        """Of a request that lacks a row, older rows at the same position must not count either."""
        self._lost.update(ids)
        self._forget(ids)

    def _forget(self, ids: Collection[str]) -> None:
        for name in ids:
            self._rows -= sum(len(positions) for positions, _ in self._parts.pop(name, ()))

    def _sort(self, wait: bool) -> None:
        """Sort the rows of copied steps by request; ``wait`` for the copies of the others."""
        steps = []
        while self._steps:
            copied = self._steps[0].copied
            if copied is not None and not wait and not copied.query():  # type: ignore[no-untyped-call]
                break
            if copied is not None:
                copied.synchronize()
            steps.append(self._steps.popleft())
        if not steps:
            return
        positions = np.concatenate([step.positions for step in steps])
        rows = np.concatenate([step.rows.numpy() for step in steps])
        numbers: dict[str, int] = {}
        ids = (name for step in steps for name in step.ids)
        owners = np.array([numbers.setdefault(name, len(numbers)) for name in ids])
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=len(numbers)))
        for name, places in zip(numbers, np.split(order, ends[:-1]), strict=True):
            self._parts.setdefault(name, []).append((positions[places], rows[places]))
        self._forget(self._lost)

    def _read(self, wanted: Wanted) -> bytes | None:
        """The rows as float16 LE [count, k_dim]; None if one is missing."""
        if wanted.request_id in self._lost:
            return None
        made = np.zeros((wanted.count, len(self._projection)), "<f2")
        found = np.zeros(wanted.count, bool)
        for positions, rows in self._parts.get(wanted.request_id, []):
            places = positions - wanted.first
            inside = (places >= 0) & (places < wanted.count)
            # numpy assigns in order, so of two rows at a position the last one stays.
            made[places[inside]] = rows[inside]
            found[places[inside]] = True
        return made.tobytes() if found.all() else None
