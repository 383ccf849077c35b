"""The bodies of the artifact callbacks (protocol B.6, B.7) and the headers of every callback."""

from pydantic import BaseModel, ConfigDict, Field

from proofserve.wire.records import (
    ArtifactRecord,
    UnicodeText,
    VectorEncoding,
    Whole,
    WorkRecord,
)


class Message(BaseModel):
    """Keys that are not listed are ignored: newer nodes may send more."""

    model_config = ConfigDict(frozen=True)


class Callback(Message, WorkRecord):
    """What every callback says."""


class Generated(Callback):
    """The body of ``/generated``; only jobs have a ``request_id``."""

    request_id: UnicodeText | None = None
    node_id: Whole
    artifacts: list[ArtifactRecord]
    encoding: VectorEncoding


class Validated(Callback):
    """The body of ``/validated``: the verdict of one job."""

    request_id: UnicodeText
    node_id: Whole
    n_total: Whole
    n_mismatch: Whole
    mismatch_nonces: list[Whole]
    p_value: float = Field(ge=0.0, le=1.0)
    fraud_detected: bool


class Stamp(Message):
    """The headers of a callback; senders older than proofserve have none."""

    key: str | None = None
    sequence: Whole | None = None
