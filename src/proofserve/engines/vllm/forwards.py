"""Forwards from the core's side: their KV blocks, and how chat does not wait too long (ADR 48)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm.core_messages import Forward, ProveCall, values_of
from proofserve.protocol.nonces import pad

if TYPE_CHECKING:
    from proofserve.engines.vllm.compat_core import VllmCore


class LeaseRefused(RuntimeError):
    """The pool cannot lend the blocks of one forward. The text says which option to change."""


@dataclass(slots=True, eq=False)
class Lease:
    """KV blocks for forwards of ``nonces``, which ``tables`` has as ``Forward.blocks``.

    ``last_used`` is in seconds of the monotonic clock.
    """

    nonces: int
    block_sizes: tuple[int, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...]
    blocks: list[Any]
    last_used: float


class LeaseTable:
    """All leases of one engine core, ``held`` by name. Only the core's loop may change it."""

    def __init__(self, core: "VllmCore") -> None:
        self._core = core
        self.held: dict[str, Lease] = {}

    @property
    def held_blocks(self) -> int:
        return sum(len(lease.blocks) for lease in self.held.values())

    def get(self, call: ProveCall, nonces: int, now: float) -> Lease:
        """The lease of the call, taken now for ``nonces`` if it is new. Raises LeaseRefused."""
        if call.lease not in self.held:
            self.held[call.lease] = self._take(call, nonces, now)
        lease = self.held[call.lease]
        lease.last_used = now
        return lease

    def release(self, name: str) -> None:
        """Give the blocks of ``name`` back; an unknown name is no error: releases may repeat."""
        if lease := self.held.pop(name, None):
            self._core.return_blocks(lease.blocks)

    def release_unused(self, before: float, except_for: set[str]) -> None:
        """Give back each lease that no call has used since ``before``: its API process is gone."""
        for name, lease in list(self.held.items()):
            if lease.last_used < before and name not in except_for:
                self.release(name)

    def _take(self, call: ProveCall, nonces: int, now: float) -> Lease:
        sizes, sequences = self._core.block_sizes(), nonces * call.sequences_per_nonce
        lengths = [ceil(call.seq_len / size) for size in sizes]
        count = sequences * sum(lengths)
        try:
            blocks = self._core.take_blocks(count)
        except ValueError as error:
            raise LeaseRefused(
                f"a forward of {nonces} nonces of {call.seq_len} tokens needs {count} KV blocks, "
                f"{self._core.free_blocks()} are free. Lower --poc-forward-batch or give "
                "vLLM more KV cache."
            ) from error
        ids = iter([block.block_id for block in blocks])
        tables = tuple(
            tuple(tuple(islice(ids, length)) for _ in range(sequences)) for length in lengths
        )
        return Lease(nonces, sizes, tables, blocks, now)


# As many as a call has unless its request says otherwise: the rest would be padding.
MOST_NONCES = 32
# A part of a forward is planned to take so much of the longest wait: it may take longer then.
AIM = 0.8
# Measured forwards. The first one also prepares kernels and the block's tensors.
TRIES = 2
# Of the newest forward in the means.
NEWEST = 0.25


@dataclass(slots=True)
class ForwardSize:
    """All forwards of one shape have ``nonces``, and run ``per_part`` of their layers at a time.

    Until it ``is_found``, forwards of one nonce are measured, layer by layer. ``nonces`` are
    ``most``, or a power of two of which a single layer is within ``AIM`` of ``max_wait_s``;
    ``per_part`` follows the time of the forwards that ran (ADR 48). ``seconds`` of a forward and
    ``part_s`` of its longest part are means.
    """

    max_wait_s: float
    most: int
    layers: int
    nonces: int = 1
    per_part: int = 1
    is_found: bool = False
    seconds: float = 0.0
    part_s: float = 0.0
    forwards: int = 0

    def measured(self, parts_s: Sequence[float]) -> None:
        """A forward of one nonce took ``parts_s``, one for each part."""
        if not self.forwards or sum(parts_s) < self.seconds:
            self.seconds, self.part_s = sum(parts_s), max(parts_s)
        self.forwards += 1
        if self.forwards == TRIES:
            fit = int(min(self.most, max(1.0, AIM * self.max_wait_s / self.part_s)))
            self.nonces = fit if fit == self.most else 1 << (fit.bit_length() - 1)
            self.is_found, self.forwards = True, 0
            self.seconds, self.part_s = self.nonces * self.seconds, self.nonces * self.part_s
            self._plan()
            # Until a forward has run: what is expected of the longest part.
            self.part_s = max(self.part_s, self.seconds * self.per_part / self.layers)

    def ran(self, parts_s: Sequence[float]) -> None:
        """A forward of ``nonces`` took ``parts_s``; the first one replaces what was expected."""
        newest = NEWEST if self.forwards else 1.0
        self.seconds += (sum(parts_s) - self.seconds) * newest
        self.part_s += (max(parts_s) - self.part_s) * newest
        self.forwards += 1
        self._plan()

    def _plan(self) -> None:
        fit = AIM * self.max_wait_s * self.layers / max(self.seconds, 1e-9)
        self.per_part = int(min(self.layers, max(1.0, fit)))


class ForwardSizes:
    """The sizes of one engine core, by shape: scheme and tokens.

    ``fixed``: nonces of each forward, as far as the engine holds them; None to measure. A core that
    does not chat while it proves runs forwards without a pause.
    """

    def __init__(self, core: "VllmCore", fixed: int | None, max_wait_s: float) -> None:
        self._core, self._max_wait_s = core, max_wait_s
        chats = core.has_own_loop()
        self._fixed = fixed or (None if chats else MOST_NONCES)
        self._layers = core.layers() if chats else 1
        self._sizes: dict[object, ForwardSize] = {}
        self._newest: ForwardSize | None = None

    def of(self, call: ProveCall) -> ForwardSize:
        """Raises LeaseRefused if a step of the engine holds no nonce of this shape."""
        shape = _shape(call)
        if shape not in self._sizes:
            # A prompt that is longer than a step is proved all the same.
            sequences = max(1, self._core.max_sequences(call.seq_len))
            fits = sequences // call.sequences_per_nonce
            if not fits:
                raise LeaseRefused(
                    f"a step of the engine holds {sequences} sequence of {call.seq_len} tokens, "
                    f"and a nonce has {call.sequences_per_nonce}. Raise --max-num-batched-tokens."
                )
            most = min(self._fixed or MOST_NONCES, fits)
            size = ForwardSize(self._max_wait_s, most, self._layers)
            if self._fixed:
                size.nonces, size.is_found = most, True
            self._sizes[shape] = size
        self._newest = self._sizes[shape]
        return self._newest

    def forget(self, call: ProveCall) -> None:
        """Have the size of this shape measured again, because the machine may have changed."""
        if not self._fixed:
            self._sizes.pop(_shape(call), None)

    def read(self) -> dict[str, Any]:
        """The size that was used last; zeros before it is found."""
        found = self._newest if self._newest and self._newest.is_found else None
        return {
            "max_wait_s": self._max_wait_s,
            "forward_nonces": found.nonces if found else 0,
            "forward_s": found.seconds if found else 0.0,
            "part_s": found.part_s if found else 0.0,
        }


def _shape(call: ProveCall) -> object:
    return call.seq_len, tuple(sorted(call.scheme.items()))


def run_layers(
    core: "VllmCore",
    lease: Lease,
    call: ProveCall,
    nonces: Sequence[int],
    layers: tuple[int, int, int] = (0, 1, 1),
) -> tuple[NDArray[np.float32], list[int]] | None:
    """Run ``layers`` of a forward that proves ``nonces``, padded to those of the lease.

    ``layers``: the first to run, the one behind the last to run, and how many there are; all of
    them by default. Returns values float32 [nonces - failed, width] in the order of the nonces, and
    the nonces that failed; None if more layers follow. Raises the error that a worker raised.
    """
    padded = replace(call, nonces=pad(nonces, lease.nonces))
    reply = core.run_forward(Forward(padded, lease.tables, lease.block_sizes, *layers))
    if reply is None:
        return None
    failed = [nonce for nonce in reply["failed"] if nonce >= 0]
    # Padding nonces follow the wanted ones, so the wanted ones' rows come first.
    return values_of(reply)[: len(nonces) - len(failed)], failed
