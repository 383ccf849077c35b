"""What the lab asks of a node, and what it reads back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proofserve.rounds.records import EngineGauges


@dataclass(frozen=True, slots=True)
class Work:
    """An order for proofs. ``seq_len`` is in tokens per nonce, ``k_dim`` in values per vector."""

    model: str
    block_hash: str = "lab-block"
    public_key: str = "lab-key"
    seq_len: int = 256
    k_dim: int = 12
    batch_size: int = 32

    @property
    def params(self) -> dict[str, Any]:
        """The part of a request that must fit the deployment."""
        return {"model": self.model, "seq_len": self.seq_len, "k_dim": self.k_dim}

    @property
    def body(self) -> dict[str, Any]:
        """The request of a node that is alone on its network."""
        return {
            "block_hash": self.block_hash,
            "block_height": 1,
            "public_key": self.public_key,
            "node_id": 0,
            "node_count": 1,
            "batch_size": self.batch_size,
            "params": self.params,
        }


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """``GET /status``: counts of the current or last round, and the engine's own counters.

    ``rate`` is in nonces per second since the round began.
    """

    state: str
    round_id: str | None
    processed: int
    failed: int
    rate: float
    engine: EngineGauges | None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "NodeStatus":
        """From the answer's JSON; a node without a round has no stats."""
        stats = body["stats"] or {}
        gauges = body.get("engine")
        return cls(
            state=body["status"],
            round_id=body.get("round_id"),
            processed=stats.get("total_processed", 0),
            failed=stats.get("failed", 0),
            rate=stats.get("nonces_per_second", 0.0),
            engine=_gauges(gauges) if gauges else None,
        )


def _gauges(body: Mapping[str, Any]) -> EngineGauges:
    # A newer node may show more than this client knows.
    known = {name: body[name] for name in EngineGauges.__dataclass_fields__}
    return EngineGauges(**{**known, "resume_ms": tuple(known["resume_ms"])})


@dataclass(frozen=True, slots=True)
class BareSpeed:
    """Forwards called back to back inside the engine: the speed that nothing can exceed."""

    nonces_per_second: float
    seconds_per_forward: float
    sequences: int
