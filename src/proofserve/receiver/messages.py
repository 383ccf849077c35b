"""The bodies of the artifact callbacks (protocol B.6, B.7) and what is known of their sending."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from proofserve.protocol.nonces import MAX_NONCE

Nonce = Annotated[int, Field(ge=0, le=MAX_NONCE)]


class Message(BaseModel):
    """Keys that are not listed are left alone: newer nodes may say more."""

    model_config = ConfigDict(frozen=True)


class Encoding(Message):
    """How a vector is written: ``k_dim`` float16 values, little-endian, in base64."""

    dtype: Literal["f16"]
    k_dim: int = Field(ge=1)
    endian: Literal["le"]


class SentArtifact(Message):
    """One nonce and its vector."""

    nonce: Nonce
    vector_b64: str


class Generated(Message):
    """The body of ``/generated``; only jobs have a ``request_id``."""

    request_id: str | None = None
    public_key: str
    block_hash: str
    block_height: int
    node_id: int
    artifacts: list[SentArtifact]
    encoding: Encoding


class Validated(Message):
    """The body of ``/validated``: the verdict of one job."""

    request_id: str
    public_key: str
    block_hash: str
    block_height: int
    node_id: int
    n_total: int = Field(ge=0)
    n_mismatch: int = Field(ge=0)
    mismatch_nonces: list[Nonce]
    p_value: float = Field(ge=0.0, le=1.0)
    fraud_detected: bool


class Stamp(Message):
    """The headers of a callback; senders older than proofserve have none."""

    key: str | None = None
    sequence: int | None = None
