"""The messages from the API process to the engine core, and from there to the workers.

vLLM's utility calls carry msgpack, so a call travels as a dictionary of its fields. Numbers of
a forward travel as raw float32 bytes; inputs never travel, the workers draw them from seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ProveCall:
    """Prove ``nonces`` under the lease ``lease``; it is opened by its first call.

    ``weights_digest`` and ``token_ranges`` are facts of the checkpoint, None and empty if it lacks
    them: the engine's own processes never read its files again.

    After ``defer_s`` seconds the call is answered with what is done by then, or ``deferred`` if
    chat let nothing be done.
    """

    lease: str
    scheme: Mapping[str, str | int | bool]
    sequences_per_nonce: int
    weights_digest: str | None
    token_ranges: tuple[tuple[int, int], ...]
    block_hash: str
    block_height: int
    public_key: str
    seq_len: int
    nonces: Sequence[int]
    defer_s: float


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward: ``sequences_per_nonce`` sequences for each nonce, or a part of one.

    ``blocks[g][i]`` lists the KV blocks of sequence ``i`` in KV-cache group ``g``, each of
    ``block_sizes[g]`` tokens. Picklable, because an executor may send it to other processes.

    A part runs the layers from ``first`` to below ``end`` of all ``layers``. The parts of a forward
    come in order, and steps of chat may run between them.
    """

    call: ProveCall
    blocks: tuple[tuple[tuple[int, ...], ...], ...]
    block_sizes: tuple[int, ...]
    first: int = 0
    end: int = 1
    layers: int = 1

    @property
    def sequences(self) -> int:
        return len(self.call.nonces) * self.call.sequences_per_nonce

    @property
    def is_last(self) -> bool:
        return self.end == self.layers


# The kinds of replies to a ProveCall.
PROVED = "proved"
DEFERRED = "deferred"
FAULT = "fault"


def proved(values: NDArray[np.float32], failed: list[int], done: int) -> dict[str, Any]:
    """The first ``done`` nonces of a call: ``values`` float32 [done - len(failed), width]."""
    return {
        "kind": PROVED,
        "done": done,
        "width": values.shape[1],
        "values": values.tobytes(),
        "failed": failed,
    }


def values_of(reply: Mapping[str, Any]) -> NDArray[np.float32]:
    flat = np.frombuffer(reply["values"], dtype=np.float32)
    return flat.reshape(-1, reply["width"])


def deferred(reason: str, seconds: float) -> dict[str, Any]:
    """Chat held the call back for ``seconds``; nothing was computed for it."""
    return {"kind": DEFERRED, "reason": reason, "seconds": seconds}


def fault(error: str) -> dict[str, Any]:
    """The call was not computed; the engine still runs."""
    return {"kind": FAULT, "error": error}
