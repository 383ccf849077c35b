"""What crosses vLLM's processes for receipts: API process, engine core, workers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from proofserve.protocol.receipts.record import Sampling


@dataclass(frozen=True, slots=True)
class TapPlan:
    """How the workers make sketches. ``most_rows``: rows that a worker keeps at most."""

    sketch_key: str
    weights_digest: str
    k_dim: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """The rows of one request at the ``count`` positions from ``first`` on.

    The row at a position is the state that chose the token at the next one.
    """

    request_id: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """A request that the scheduler has finished. ``prompt`` and ``output`` are ids, u32 LE.

    ``external_id`` is the id that vLLM's API gave to the request, ``request_id`` vLLM's own one.
    """

    request_id: str
    external_id: str
    adapter: str | None
    sampling: Sampling
    prompt: bytes
    output: bytes
    finish_reason: str
    created_ms: int

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.request_id, len(self.prompt) // 4 - 1, len(self.output) // 4)

    def to_wire(self, sketches: bytes | None) -> dict[str, Any]:
        """``sketches`` are float16 LE [output tokens, k_dim], None if rows were lost."""
        return {**asdict(self), "sketches": sketches}


def ended_answer(wire: Mapping[str, Any]) -> tuple[EndedAnswer, bytes | None]:
    """The answer and its sketches, from ``EndedAnswer.to_wire``."""
    fields = {name: value for name, value in wire.items() if name != "sketches"}
    return EndedAnswer(**{**fields, "sampling": Sampling(**fields["sampling"])}), wire["sketches"]


def token_ids(raw: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(raw, "<u4").tolist())
