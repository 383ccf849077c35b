"""The only reader of the environment. Everything below receives frozen values.

Variables are named ``POC_…`` as networks know them; ``proofserve serve`` turns its options into
them, so that vLLM's processes, which inherit the environment, all see the same deployment.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

PLUGIN = "proofserve"
# Of the gateway's variables.
PREFIX = "VLLM_"
# The groups that vLLM loads whole while VLLM_PLUGINS is unset.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
# Variables that let somebody in; a server that we start for ourselves needs none of them.
ACCESS_VARIABLES = frozenset(
    {"POC_API_KEY", "POC_VIEWER_KEY", "POC_API_KEYS_FILE", "POC_ALLOW_ANONYMOUS"}
)
# What a header can carry as a bearer key (RFC 6750); a comma separates keys in a variable.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")

M = TypeVar("M", bound=BaseModel)


def _bearer_key(key: SecretStr) -> SecretStr:
    if not _KEY.fullmatch(key.get_secret_value()):
        raise ValueError("a key consists of letters, digits and . _ ~ + / - and may end with =")
    return key


def _listed(value: object) -> object:
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


BearerKey = Annotated[SecretStr, AfterValidator(_bearer_key)]
BearerKeys = Annotated[tuple[BearerKey, ...], NoDecode, BeforeValidator(_listed)]
Texts = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_listed)]


class EngineSettings(BaseSettings):
    """What the engine core needs: the shape of a forward, the share of proofs, idle leases."""

    model_config = SettingsConfigDict(env_prefix="POC_", frozen=True)

    forward_batch: int = Field(32, ge=1, le=1024)
    share: float = Field(0.0, ge=0.0, le=0.9)
    lease_idle_sec: float = Field(30.0, gt=0.0)


class NodeSettings(BaseSettings):
    """What the API process needs. Durations in seconds unless the name says otherwise."""

    # An error that shows its input would show keys.
    model_config = SettingsConfigDict(
        env_prefix="POC_", frozen=True, env_ignore_empty=True, hide_input_in_errors=True
    )

    enabled: bool = False
    measure: bool = False
    resume: bool = False
    scheme: Literal["artifact-v1", "artifact-v1-layers"] = "artifact-v1"
    seq_len: int | None = Field(None, ge=1)
    k_dim: int | None = Field(None, ge=1)
    batch_size_default: int = Field(32, ge=3, le=1024)
    outbox: Path = Path("proofserve-outbox.sqlite")
    defer_sec: float = Field(5.0, gt=0)
    rpc_timeout_ms: int = Field(60_000, ge=1)
    max_queued_nonces: int = Field(100_000, ge=1)
    max_open_waits: int = Field(64, ge=1)
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1)
    requests_per_minute: int = Field(6000, ge=1)
    generate_chunk_timeout_sec: float = Field(60.0, gt=0)
    generate_result_ttl_sec: float = Field(300.0, gt=0)
    callback_interval_sec: float = Field(5.0, gt=0)
    callback_max_artifacts: int = Field(1_000_000, ge=1)
    callback_max_retries: int = Field(10, ge=0)
    callback_max_concurrent: int = Field(10, ge=1)
    callback_queue_size: int = Field(10_000, ge=1)
    shutdown_flush_sec: float = Field(5.0, ge=0)
    callback_allow: Texts = ("loopback",)
    callback_secret: SecretStr | None = None
    api_key: BearerKeys = ()
    viewer_key: BearerKeys = ()
    api_keys_file: Path | None = None
    allow_anonymous: bool = False


def node_settings(changes: Mapping[str, str]) -> NodeSettings:
    """What this environment with ``changes`` gives. Raises ValidationError."""
    fields = {name.removeprefix("POC_").lower(): text for name, text in changes.items()}
    known = NodeSettings.model_fields.keys() & fields.keys()
    return NodeSettings.model_validate({name: fields[name] for name in known})


class GatewaySettings(BaseSettings):
    """What the gateway needs. Each field is a variable, and an option of ``proofserve gateway``."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, allow_inf_nan=False)

    backend_url: str = Field(
        "http://127.0.0.1:8001",
        description="vLLM servers, separated by commas; http://a:8001*2 has a weight of 2.",
    )
    host: str = Field("0.0.0.0", description="Where to listen.")  # noqa: S104 - as required
    port: int = Field(7000, ge=0, le=65535, description="Where to listen.")
    max_concurrent_requests: int = Field(
        100, ge=1, description="Permits: requests that are at backends at a time."
    )
    max_queued_requests: int = Field(
        1000, ge=0, description="Requests that may wait for a permit; one more gets 503."
    )
    queue_wait_timeout_seconds: float = Field(
        60.0, gt=0, description="Longest wait for a permit, then 503."
    )
    request_timeout_seconds: float = Field(
        120.0, gt=0, description="Longest time from the permit to the end of the answer."
    )
    connect_timeout_seconds: float = Field(
        5.0, gt=0, description="Longest time for a backend to accept a connection."
    )
    first_byte_timeout_seconds: float = Field(
        120.0, gt=0, description="Longest time for a backend to begin its answer."
    )
    stall_timeout_seconds: float = Field(
        60.0, gt=0, description="Longest silence of a backend in mid-answer."
    )
    drain_timeout_seconds: float = Field(
        30.0, ge=0, description="For requests in flight to finish after SIGTERM."
    )
    probe_interval_seconds: float = Field(
        5.0, gt=0, description="Between two looks at a backend's health and models."
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024, ge=1, description="Largest body of a request; a larger one gets 413."
    )
    prefix_affinity: bool = Field(
        False, description="Send conversations that begin alike to the same backend."
    )
    client_keys_file: Path | None = Field(
        None, description="TOML file of [[client]] keys and their limits; none: open to all."
    )
    backend_api_key: str | None = Field(None, description="The key that the backends ask for.")
    gateway_admin_key: str | None = Field(
        None, description="Opens /admin to other machines; without it only this one may."
    )
    cors_origins: str = Field(
        "", description="Web origins that may call, separated by commas; * for all."
    )
    gateway_workers: int = Field(
        1, ge=1, description="Processes; they share permits and queue evenly."
    )
    use_embedded_engine: bool = Field(
        False, description="Run vLLM in this process, without a backend URL."
    )
    model: str | None = Field(
        None, description="Of the embedded engine: name or folder, as vLLM takes it."
    )
    engine_options: str = Field(
        "", description="Of the embedded engine: vLLM's own options, in one string."
    )

    def variables(self) -> dict[str, str]:
        """The environment that gives these settings again."""
        values = self.model_dump(exclude_none=True)
        return {f"{PREFIX}{name.upper()}": str(value) for name, value in values.items()}


class ClientKey(BaseModel):
    """One ``[[client]]`` of the file of client keys. What is left out has no limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    key: str = Field(min_length=1)
    concurrency: int | None = Field(None, ge=1)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


class ClientKeyFile(BaseModel):
    """The file of client keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    client: tuple[ClientKey, ...] = Field(min_length=1)


class NodeKey(BaseModel):
    """One ``[[key]]`` of a node's file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str = Field(min_length=1)
    key: BearerKey
    role: Literal["operator", "viewer"]
    requests_per_minute: int | None = Field(None, ge=1)


class NodeKeyFile(BaseModel):
    """A node's file of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    key: tuple[NodeKey, ...] = Field(min_length=1)


def client_keys(file: Path) -> tuple[ClientKey, ...]:
    """The gateway's keys in a TOML file.

    Raises:
        ValueError: the file cannot be read, or says what cannot be meant.
    """
    clients = _read_toml(file, ClientKeyFile).client
    for what in ("name", "key"):
        values = [getattr(each, what) for each in clients]
        if len(set(values)) < len(values):
            raise ValueError(f"{file}: two clients share a {what}")
    return clients


def node_keys(file: Path) -> tuple[NodeKey, ...]:
    """A node's keys in a TOML file. Raises ValueError as ``client_keys`` does."""
    keys = _read_toml(file, NodeKeyFile).key
    if len({each.name for each in keys}) < len(keys):
        raise ValueError(f"{file}: two keys share a name")
    return keys


def _read_toml(file: Path, model: type[M]) -> M:
    try:
        return model.model_validate(tomllib.loads(file.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{file}: {field}: {first['msg']}") from error
    except ValueError as error:
        raise ValueError(f"{file} is no TOML: {error}") from error


def export(changes: Mapping[str, str], drop: Iterable[str] = ()) -> None:
    """Change this process's own environment, which its children inherit."""
    os.environ.update(changes)
    for name in drop:
        os.environ.pop(name, None)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a child that we start."""
    return {**os.environ, **changes}


def has_variable(name: str) -> bool:
    """Whether the user set ``name``; defaults of ours step back for it."""
    return name in os.environ


def plugin_list() -> str:
    """The value of VLLM_PLUGINS that adds us without silencing anybody else.

    Setting the variable silences every plugin that it does not name, so all installed ones are
    listed when the user has not chosen.
    """
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
    else:
        names = [p.name for group in PLUGIN_GROUPS for p in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def python() -> str:
    """The interpreter that runs us."""
    return sys.executable
