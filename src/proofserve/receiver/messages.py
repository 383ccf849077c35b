"""The bodies of the artifact callbacks (protocol B.6, B.7) and what is known of any's sending."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from proofserve.protocol.nonces import MAX_NONCE


def _unicode(text: str) -> str:
    # JSON can spell half a surrogate pair, which no file and no hash can take.
    text.encode()
    return text


Text = Annotated[str, AfterValidator(_unicode)]
Nonce = Annotated[int, Field(ge=0, le=MAX_NONCE)]
# The file stores integers of 64 bits.
Whole = Annotated[int, Field(ge=0, le=2**63 - 1)]


class Message(BaseModel):
    """Keys that are not listed are left alone: newer nodes may say more."""

    model_config = ConfigDict(frozen=True)


class VectorEncoding(Message):
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

    request_id: Text | None = None
    public_key: Text
    block_hash: Text
    block_height: Whole
    node_id: Whole
    artifacts: list[SentArtifact]
    encoding: VectorEncoding


class Validated(Message):
    """The body of ``/validated``: the verdict of one job."""

    request_id: Text
    public_key: Text
    block_hash: Text
    block_height: Whole
    node_id: Whole
    n_total: Whole
    n_mismatch: Whole
    mismatch_nonces: list[Nonce]
    p_value: float = Field(ge=0.0, le=1.0)
    fraud_detected: bool


class Stamp(Message):
    """The headers of a callback; senders older than proofserve have none."""

    key: str | None = None
    sequence: Whole | None = None
