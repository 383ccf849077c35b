"""Settings of the gateway: its variables, which are also options, and its file of client keys."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from proofserve.gateway.records import ClientSpec
from proofserve.settings.node import read_tables

# Prefix of the gateway's variables.
PREFIX = "VLLM_"


class GatewaySettings(BaseSettings):
    """The settings of the gateway; each field is a variable and an option of ``gateway``."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    backend_url: str = "http://127.0.0.1:8001"
    """vLLM servers, separated by commas; http://a:8001*2 has a weight of 2. With dns: before it,
    every address of the host is a server, looked up again each half a minute."""
    host: str = "0.0.0.0"  # noqa: S104 - as required
    """Address to listen on."""
    port: int = Field(7000, ge=0, le=65535)
    """Port to listen on."""
    max_concurrent_requests: int = Field(100, ge=1)
    """Permits: most requests at backends at the same time."""
    max_queued_requests: int = Field(1000, ge=0)
    """Requests that may wait for a permit; one more gets 503."""
    queue_wait_timeout_seconds: float = Field(60.0, gt=0)
    """Longest wait for a permit, then 503."""
    request_timeout_seconds: float = Field(120.0, gt=0)
    """Longest time from the permit to the end of the answer."""
    connect_timeout_seconds: float = Field(5.0, gt=0)
    """Longest time for a backend to accept a connection."""
    first_byte_timeout_seconds: float = Field(120.0, gt=0)
    """Longest time for a backend to begin its answer."""
    stall_timeout_seconds: float | None = Field(None, gt=0)
    """Longest silence within an answer; unset: the request timeout."""
    drain_timeout_seconds: float = Field(30.0, ge=0)
    """Longest time for requests in flight to finish after SIGTERM."""
    probe_interval_seconds: float = Field(5.0, gt=0)
    """Time between two probes of a backend's health and models."""
    other_paths: str = ""
    """More POST paths of vLLM to relay, separated by commas; their tokens are not counted."""
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1)
    """Largest body of a request; a larger one gets 413."""
    prefix_affinity: bool = False
    """Send conversations with the same beginning to the same backend."""
    client_keys_file: Path | None = None
    """TOML file of [[client]] keys and limits; without it every client may call."""
    shared_limits: str | None = None
    """redis://HOST:6379: gateways with the same one count the limits of keys together."""
    backend_api_key: str | None = None
    """The API key that the backends require."""
    gateway_admin_key: str | None = None
    """Key for /admin; without it only this machine may call /admin."""
    dashboard: bool = False
    """Serve GET /dashboard, a page that shows this gateway live."""
    remembered_answers: int = Field(10_000, ge=0)
    """Newest answers whose receipts GET /v1/receipts finds; 0: none."""
    cors_origins: str = ""
    """Web origins that may call, separated by commas; * for all."""
    gateway_workers: int = Field(1, ge=1, le=256)
    """Processes; each has an equal part of permits and queue."""
    use_embedded_engine: bool = False
    """Run vLLM in this process, without a backend URL."""
    model: str | None = None
    """Model of the embedded engine: a name or folder, as for vLLM."""
    engine_options: str = ""
    """Options of vLLM for the embedded engine, in one string."""

    receipts: bool = False
    """Keep receipts of the embedded engine's chat; needs POC_ENABLED=1."""

    def variables(self) -> dict[str, str]:
        values = self.model_dump(exclude_none=True)
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}


def client_keys(file: Path) -> tuple[ClientSpec, ...]:
    """The keys in a TOML file. Raises ValueError if the file is missing or not valid."""
    return read_tables(file, "client", ClientSpec, distinct=("name", "key"))
