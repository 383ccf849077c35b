"""KV blocks that are borrowed from vLLM's pool: the only cache memory that proof forwards write."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from proofserve.engines.vllm.core_port import CorePort


class LeaseRefused(RuntimeError):
    """The pool cannot lend the blocks of one forward. The text says which option to change."""


@dataclass(slots=True)
class Lease:
    """Blocks for ``sequences`` sequences of ``seq_len`` tokens in every KV-cache group.

    ``last_used`` is in seconds of the monotonic clock.
    """

    seq_len: int
    sequences: int
    block_sizes: tuple[int, ...]
    held: list[Any]
    last_used: float
    tables: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        ids = iter([block.block_id for block in self.held])
        self.tables = tuple(
            tuple(
                tuple(next(ids) for _ in range(ceil(self.seq_len / size)))
                for _ in range(self.sequences)
            )
            for size in self.block_sizes
        )


class LeaseTable:
    """All leases of one engine core. Not thread-safe: only the core's loop uses it."""

    def __init__(self, core: CorePort, forward_batch: int) -> None:
        self._core = core
        self._forward_batch = forward_batch
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held_blocks(self) -> int:
        return sum(len(lease.held) for lease in self._leases.values())

    def sequences(self, seq_len: int) -> int:
        """Sequences in a forward of ``seq_len`` tokens: one shape per deployment and length.

        It is the option, or less if a step of the engine holds less. It never depends on the
        request: otherwise a vector would depend on its batch.
        """
        return max(1, min(self._forward_batch, self._core.max_sequences(seq_len)))

    def get(self, name: str, seq_len: int, now: float) -> Lease:
        """The lease ``name``, taken now if it is new. Raises LeaseRefused."""
        if name not in self._leases:
            self._leases[name] = self._take(seq_len, now)
        lease = self._leases[name]
        lease.last_used = now
        return lease

    def release(self, name: str) -> None:
        """Give the blocks of ``name`` back; an unknown name is no error: releases may repeat."""
        lease = self._leases.pop(name, None)
        if lease is not None:
            self._core.return_blocks(lease.held)

    def release_all(self) -> None:
        for name in list(self._leases):
            self.release(name)

    def release_unused(self, before: float, except_for: set[str]) -> None:
        """Give back each lease that no call has used since ``before``: its API process is gone."""
        for name, lease in list(self._leases.items()):
            if lease.last_used < before and name not in except_for:
                self.release(name)

    def _take(self, seq_len: int, now: float) -> Lease:
        sizes = self._core.block_sizes()
        sequences = self.sequences(seq_len)
        count = sequences * sum(ceil(seq_len / size) for size in sizes)
        try:
            held = self._core.take_blocks(count)
        except ValueError as error:
            raise LeaseRefused(
                f"a forward of {sequences} sequences of {seq_len} tokens needs {count} KV blocks, "
                f"{self._core.free_blocks()} are free. Lower --poc-forward-batch or give "
                "vLLM more KV cache."
            ) from error
        return Lease(seq_len, sequences, sizes, held, now)
