"""Settings of a node: the variables ``POC_…``, and the file of its keys. How a TOML file is read.

``proofserve serve`` turns its options into these variables, because vLLM's processes inherit the
environment and must all have the same values.
"""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from proofserve.settings.process import has_variable
from proofserve.wire.records import first_problem

# Prefix of a node's variables.
PREFIX = "POC_"
# Variables about access; a server that a command starts for itself needs none of them.
ACCESS_VARIABLES = frozenset(
    {
        "POC_API_KEY",
        "POC_VIEWER_KEY",
        "POC_VALIDATOR_KEY",
        "POC_API_KEYS_FILE",
        "POC_ALLOW_ANONYMOUS",
    }
)
# The characters of a bearer key (RFC 6750), without the comma, which separates keys.
_KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")


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


# Of a node and a fleet. Errors hide their input, which may be a key.
CONFIG = SettingsConfigDict(
    env_prefix=PREFIX,
    frozen=True,
    env_ignore_empty=True,
    hide_input_in_errors=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)


class ServiceSettings(BaseSettings):
    """What a node and a fleet's controller share: their clients, limits and callbacks."""

    model_config = CONFIG

    batch_size_default: int = Field(32, ge=3, le=1024)
    """Nonces per engine call if the request has no batch_size."""
    max_queued_nonces: int = Field(100_000, ge=1)
    """Most nonces of queued and running jobs, and of one request."""
    max_open_waits: int = Field(64, ge=1)
    """Most open calls of /generate with `wait`, of /validate and /open."""
    max_body_bytes: int = Field(32 * 1024 * 1024, ge=1)
    """Largest body of a request, bytes; a larger one gets 413."""
    requests_per_minute: int = Field(6000, ge=1)
    """Most requests of one key, or of all clients if there are no keys."""
    callback_max_retries: int = Field(10, ge=0)
    """A callback expires after this many failures; 0: never."""
    callback_max_concurrent: int = Field(10, ge=1)
    """Most receivers to which callbacks are posted at the same time."""
    callback_queue_size: int = Field(10_000, ge=1)
    """Undelivered callbacks above which a new job gets 429."""
    shutdown_flush_sec: float = Field(5.0, ge=0)
    """Longest time for due callbacks when the server ends, seconds."""
    callback_allow: Texts = ("loopback",)
    """Where callbacks may go: https://host[:port], a network like 10.0.0.0/8, or loopback.
    Several: with commas, or repeat the option."""
    callback_secret: SecretStr | None = None
    """Secret that signs callbacks; better as a variable than as an option."""
    api_key: BearerKeys = ()
    """Operators' keys: all calls. Better as a variable than as an option."""
    viewer_key: BearerKeys = ()
    """Viewers' keys: GET only. Better as a variable than as an option."""
    validator_key: BearerKeys = ()
    """Validators' keys: GET, challenges, /open. Better as a variable than as an option."""
    challenge_nonces_per_hour: int = Field(1000, ge=1)
    """Most nonces an hour that one validator's key may have computed, in each server."""
    api_keys_file: Path | None = None
    """TOML file of [[key]] tables: name, key, role."""
    allow_anonymous: bool = False
    """Every client may do everything without a key; not together with keys."""


class EngineSettings(BaseSettings):
    model_config = CONFIG

    max_wait_ms: int | None = Field(None, ge=1)
    """Longest wait of a chat request for proofs, milliseconds; unset: 100, on a processor 250."""
    forward_batch: int | None = Field(None, ge=1, le=1024)
    """Nonces per forward; unset: measured when a round begins, so that chat waits no longer."""
    share: float = Field(0.0, ge=0.0, le=0.9)
    """Fraction of engine time for proofs while chat never pauses."""
    lease_idle_sec: float = Field(30.0, gt=0.0)
    """Unused KV blocks go back to vLLM's pool after this, seconds."""
    unvetted: bool = False
    """Start with a vLLM that was not vetted if it has every name that proofs rely on."""


class NodeSettings(EngineSettings, ServiceSettings):
    """The settings of a server with proofs. Each field is a variable and an option of ``serve``."""

    enabled: bool = False
    """Open the proof endpoints under /api/v1/pow."""
    measure: bool = False
    """Open POST /api/v1/pow/measure for `bench`; not for a node in service."""
    dashboard: bool = False
    """Serve GET /dashboard, a page that shows this node live."""
    receipts: bool = False
    """Keep a receipt of every chat answer: sketches of its tokens; needs --enable-poc."""
    receipts_k_dim: int = Field(32, ge=16, le=64)
    """Dimensions of a token's sketch in a receipt."""
    resume: bool = False
    """Continue the round that ran when the server ended; same model only."""
    scheme: Literal["artifact-v1", "artifact-v1-layers", "sketch-v1", "sketch-v2"] | None = None
    """Fix the scheme of artifacts; requests for another get 409. Unset: as each request says."""
    seq_len: int | None = Field(None, ge=1)
    """Fix the tokens per nonce; requests with another value get 409."""
    k_dim: int | None = Field(None, ge=1)
    """Fix the dimensions of a vector; requests with another value get 409."""
    outbox: Path = Path("proofserve-outbox.sqlite")
    """SQLite file that keeps results until they are delivered."""
    outbox_keep_days: float = Field(30.0, ge=0)
    """Delivered results and callbacks are deleted after this many days; 0: never."""
    receipts_key_file: Path | None = None
    """Key that signs answers and receipts, made at the first start; unset: beside the outbox."""
    receipts_keep_days: float = Field(7.0, ge=0)
    """Receipts are deleted after this many days; 0: never."""
    receipts_callback: str | None = None
    """URL to which entries of the receipts' log are posted."""
    defer_sec: float = Field(5.0, gt=0)
    """Longest wait for chat inside the engine per call, seconds."""
    rpc_timeout_ms: int = Field(60_000, ge=1)
    """A call fails if the engine does not answer for this long, milliseconds."""
    engine_stall_sec: float = Field(60.0, gt=0)
    """An engine core with work that neither steps nor computes for this long hangs, seconds."""
    generate_chunk_timeout_sec: float = Field(60.0, gt=0)
    """Longest time that chat may delay one chunk of a job, seconds."""
    generate_result_ttl_sec: float = Field(300.0, gt=0)
    """Time that the result of a finished job is kept, seconds."""
    callback_interval_sec: float = Field(5.0, gt=0)
    """Shortest time between two artifact callbacks of a round, seconds."""
    callback_max_artifacts: int = Field(1_000_000, ge=1)
    """Most artifacts in one callback; the next one has the rest."""
    fleet: str | None = None
    """URL of a fleet that this node joins by itself."""
    fleet_key: SecretStr | None = None
    """Key for joining the fleet; better as a variable than as an option."""
    fleet_name: str | None = Field(None, min_length=1, max_length=100)
    """Name of this node in the fleet; unset: the host's name."""
    fleet_address: str | None = None
    """URL under which the fleet reaches this node."""


def require_valid_settings() -> None:
    """Raise ValueError, with name and reason, for a variable that is not valid.

    Without ``POC_ENABLED`` none is checked: other software may use names with ``POC_``.
    """
    try:
        NodeSettings()
    except ValidationError as error:
        if has_variable(f"{PREFIX}ENABLED"):
            field, message = first_problem(error)
            name = f"{PREFIX}{field.partition('.')[0].upper()}"
            raise ValueError(f"{name}: {message}") from None


def require_proofs_for_receipts(chosen: NodeSettings) -> None:
    """Raise ValueError if receipts are on and the node that would hand them out is off."""
    if chosen.receipts and not chosen.enabled:
        raise ValueError("POC_RECEIPTS / --receipts needs POC_ENABLED=1 / --enable-poc")


M = TypeVar("M", bound=BaseModel)


class TomlTable(BaseModel):
    """A table of a file with keys: no unknown field, and no value in an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


def read_toml(file: Path, model: type[M]) -> M:
    """The content of ``file``; the context is its folder. Raises ValueError if it is not valid."""
    try:
        return model.model_validate(tomllib.loads(file.read_text("utf-8")), context=file.parent)
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        field, message = first_problem(error)
        raise ValueError(f"{file}: {field}: {message}") from error
    except ValueError as error:
        raise ValueError(f"{file} is not TOML: {error}") from error


def read_tables(
    file: Path, name: str, table: type[M], fewest: int = 1, distinct: Sequence[str] = ()
) -> tuple[M, ...]:
    """The tables ``[[name]]`` of ``file``, which has nothing else. Raises as ``read_toml``.

    Also if two of them share a value of a field that is to be ``distinct``.
    """
    tables: Any = (tuple[table, ...], Field(... if fewest else (), min_length=fewest))  # type: ignore[valid-type]
    found = read_toml(file, create_model("TomlFile", __base__=TomlTable, **{name: tables}))
    rows: tuple[M, ...] = getattr(found, name)
    for what in distinct:
        if len({getattr(each, what) for each in rows}) < len(rows):
            raise ValueError(f"{file}: two {name}s share a {what}")
    return rows


class NodeKey(TomlTable):
    name: str = Field(min_length=1)
    key: BearerKey
    role: Literal["operator", "validator", "viewer"]
    requests_per_minute: int | None = Field(None, ge=1)
    nonces_per_hour: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _budget_of_a_validator(self) -> "NodeKey":
        if self.nonces_per_hour is not None and self.role != "validator":
            raise ValueError("nonces_per_hour is for the role validator")
        return self


def node_keys(file: Path) -> tuple[NodeKey, ...]:
    """A node's keys in a TOML file. Raises ValueError if the file is missing or not valid."""
    return read_tables(file, "key", NodeKey, distinct=("name",))
