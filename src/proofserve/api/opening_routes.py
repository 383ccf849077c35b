"""Opening what a round with ``"commit": "roots"`` has committed to (ADR 26)."""

import asyncio
from typing import Any

from fastapi import APIRouter
from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from proofserve.api.node import ServedNode
from proofserve.api.response_models import OpeningsAnswer, documented
from proofserve.api.schemas import Body, Text
from proofserve.protocol.nonces import check_nonces, draw
from proofserve.rounds.records import CommittedRound
from proofserve.wire.commitments import opening_record
from proofserve.wire.records import Whole

# Of one request. The node reads the whole batch of each nonce.
MOST_OPENED = 1000

_EXAMPLES: list[JsonValue] = [
    {"block_hash": "c0ffee", "public_key": "node-key", "nonces": [3, 17]},
    {"block_hash": "c0ffee", "public_key": "node-key", "seed": "9f2c", "count": 100},
]


class OpenRequest(Body, json_schema_extra={"examples": _EXAMPLES}):
    """Nonces to open, or a seed and how many nonces it shall draw."""

    block_hash: Text = Field(description="Block of the round.")
    public_key: Text = Field(description="Key of the round.")
    round_id: Text | None = Field(
        None, description="Needed if several rounds of the block and key commit roots."
    )
    nonces: list[Whole] | None = Field(
        None, min_length=1, max_length=MOST_OPENED, description="Each once."
    )
    seed: Text | None = Field(None, description="Draws among all nonces committed so far.")
    count: int | None = Field(None, ge=1, le=MOST_OPENED, description="How many to draw.")

    @model_validator(mode="after")
    def _one_choice(self) -> "OpenRequest":
        drawn = (self.seed is not None, self.count is not None)
        if drawn != (self.nonces is None,) * 2:
            raise PydanticCustomError("choice", "give either nonces, or seed and count")
        return self


def add_to(router: APIRouter) -> None:
    router.post("/open", **documented(OpeningsAnswer, 404, 409, 410, 422, 503))(open_vectors)


async def open_vectors(node: ServedNode, body: OpenRequest) -> dict[str, Any]:
    """The vectors of some nonces of a committed round, with their paths to the posted roots.

    404 for a round or nonce that is unknown, 409 for a round that publishes vectors, 410 for
    vectors that are deleted. A refused nonce is named, and none is opened then.
    """
    check_nonces("nonces", body.nonces or ())
    with node.waits.one():
        committed = await node.outbox.committed_round(
            body.block_hash, body.public_key, body.round_id
        )
        # A thread, because a draw hashes every nonce of the round.
        nonces = await asyncio.to_thread(_nonces, body, committed)
        openings = await node.outbox.openings(committed, nonces)
    return {
        "round_id": committed.round_id,
        "committed": committed.next_index,
        "openings": [opening_record(each) for each in openings],
    }


def _nonces(body: OpenRequest, committed: CommittedRound) -> tuple[int, ...]:
    if body.seed is None:
        return tuple(body.nonces or ())
    every = committed.lane.batch(0, committed.next_index)
    return draw(every, body.seed, body.count)
