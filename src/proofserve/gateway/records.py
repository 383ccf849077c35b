"""The configuration of a gateway. Frozen; durations in seconds."""

from dataclasses import dataclass, field

from pydantic import BaseModel, Field


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest times: for a permit (``queue``), after it (``total``), of silence (``stall``)."""

    queue: float = 60.0
    connect: float = 5.0
    first_byte: float = 120.0
    stall: float = 120.0
    total: float = 120.0


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A vLLM server, ``http(s)://host:port`` or ``unix:/path``; its ``weight`` is its share."""

    url: str
    weight: float = 1.0


class ClientSpec(BaseModel, extra="forbid", frozen=True):
    """A client, its key and its limits; None means no limit."""

    name: str = Field(min_length=1)
    key: str = Field(min_length=1)
    concurrency: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


@dataclass(frozen=True, slots=True)
class GatewayPlan:
    """The whole configuration of a gateway.

    Below the paths ``self_guarded`` the embedded engine checks keys of its own. The backends have
    receipts below ``receipts_path``; the newest ``remembered_answers`` are known by client. Every
    address of ``names``, which are looked up again each ``lookup_interval``, is a backend too.
    ``processes`` of the same plan share a port. Gateways with the same ``shared_limits``, the URL
    of a Redis, count the limits of keys together. POST requests to ``other_paths`` are relayed,
    too.
    """

    backends: tuple[BackendSpec, ...]
    clients: tuple[ClientSpec, ...] = ()
    max_concurrent: int = 100
    queue_limit: int = 1000
    max_body_bytes: int = 32 * 1024 * 1024
    timeouts: Timeouts = field(default_factory=Timeouts)
    affinity: bool = False
    probe_interval: float = 5.0
    drain: float = 30.0
    backend_key: str | None = None
    admin_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    self_guarded: tuple[str, ...] = ()
    receipts_path: str = ""
    remembered_answers: int = 10_000
    names: tuple[BackendSpec, ...] = ()
    lookup_interval: float = 30.0
    dashboard: bool = False
    processes: int = 1
    shared_limits: str | None = field(default=None, repr=False)
    other_paths: tuple[bytes, ...] = ()
