"""``POST /measure``: bare forwards, for benchmarks; only on servers with ``--poc-measure``."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from proofserve.api import translate
from proofserve.api.node import Deployment, Node, ServedNode
from proofserve.api.routes import empty_router
from proofserve.api.schemas import Body, Count, Params, Text
from proofserve.protocol.distance import DistanceScheme
from proofserve.protocol.identity import Block
from proofserve.rounds.ports import MeasurableEngine
from proofserve.rounds.records import Workload


class MeasureRequest(Body):
    """Bare forwards of one workload without pauses; chat waits until they are done."""

    block_hash: Text
    public_key: Text
    params: Params | None = Field(None, description="Of the artifact protocol.")
    scheme: Text | None = Field(None, description="Of the artifact protocol, as in a round.")
    seq_len: Count | None = Field(None, description="Of the distance protocol, with sign flips.")
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    forwards: Annotated[int, Field(ge=1, le=1000)] = 10

    @model_validator(mode="after")
    def _one_protocol(self) -> "MeasureRequest":
        if (self.params is None) is (self.seq_len is None):
            raise PydanticCustomError(
                "protocol", "exactly one of params (artifact) and seq_len (distance) is needed"
            )
        if self.params is None and self.scheme is not None:
            raise PydanticCustomError("protocol", "scheme belongs to params (artifact)")
        return self


def router(
    get_node: Callable[[Request], Node],
    get_engine: Callable[[Request], MeasurableEngine],
    has_keys: bool = True,
) -> APIRouter:
    async def measure(request: Request, node: ServedNode, body: MeasureRequest) -> dict[str, Any]:
        """Nonces per second of the worker alone: no HTTP, no rounds, no outbox."""
        work = _workload(body, node.deployment)
        nonces = range(body.batch_size)
        measured = await get_engine(request).measure(work, nonces, body.forwards)
        return {
            "nonces_per_second": measured.nonces / measured.seconds,
            "seconds_per_forward": measured.seconds / body.forwards,
            "sequences": measured.nonces * work.scheme.sequences_per_nonce // body.forwards,
        }

    made = empty_router(get_node, has_keys)
    made.post("/measure")(measure)
    return made


def _workload(body: MeasureRequest, deployment: Deployment) -> Workload:
    block = Block(body.block_hash, 0)
    if body.seq_len is not None:
        return Workload(DistanceScheme(), block, body.public_key, body.seq_len)
    if body.params is None:
        raise AssertionError("the body's own check lets exactly one protocol pass")
    scheme = translate.artifact_scheme(body.scheme, body.params, deployment)
    return Workload(scheme, block, body.public_key, body.params.seq_len)
