"""KV blocks that are borrowed from vLLM's pool: the only cache memory that proof forwards write."""

from dataclasses import dataclass, field
from math import ceil
from typing import Any

from proofserve.engines.vllm.core_messages import ProveCall
from proofserve.engines.vllm.core_port import CorePort


class LeaseRefused(RuntimeError):
    """The pool cannot lend the blocks of one forward. The text says which option to change."""


@dataclass(slots=True)
class Lease:
    """Blocks for ``nonces`` nonces in every KV-cache group.

    Each has ``sequences_per_nonce`` sequences of ``seq_len`` tokens. ``last_used`` is in seconds of
    the monotonic clock.
    """

    nonces: int
    sequences_per_nonce: int
    seq_len: int
    block_sizes: tuple[int, ...]
    held: list[Any]
    last_used: float
    tables: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        ids = iter([block.block_id for block in self.held])
        self.tables = tuple(
            tuple(
                tuple(next(ids) for _ in range(ceil(self.seq_len / size)))
                for _ in range(self.nonces * self.sequences_per_nonce)
            )
            for size in self.block_sizes
        )


class LeaseTable:
    """All leases of one engine core. Not thread-safe: only the core's loop uses it."""

    def __init__(self, core: CorePort) -> None:
        self._core = core
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def held_blocks(self) -> int:
        return sum(len(lease.held) for lease in self._leases.values())

    def get(self, name: str, call: ProveCall, nonces: int, now: float) -> Lease:
        """The lease ``name``, taken now for ``nonces`` of the call if it is new.

        Raises LeaseRefused.
        """
        if name not in self._leases:
            self._leases[name] = self._take(call, nonces, now)
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

    def _take(self, call: ProveCall, nonces: int, now: float) -> Lease:
        sizes, sequences = self._core.block_sizes(), nonces * call.sequences_per_nonce
        count = sequences * sum(ceil(call.seq_len / size) for size in sizes)
        try:
            held = self._core.take_blocks(count)
        except ValueError as error:
            raise LeaseRefused(
                f"a forward of {nonces} nonces of {call.seq_len} tokens needs {count} KV blocks, "
                f"{self._core.free_blocks()} are free. Lower --poc-forward-batch or give "
                "vLLM more KV cache."
            ) from error
        return Lease(nonces, call.sequences_per_nonce, call.seq_len, sizes, held, now)
