"""A node over real HTTP whose vectors a model computes, and what may be wrong with it."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from proofserve.engines.reference.kernels import own_profile
from proofserve.engines.reference.network import load, with_kernels
from proofserve.rounds.records import Deferred, EngineInfo, ProofBatch, Workload
from proofserve.wire.signed import ANSWER_HEADER
from support.committed import FakeNode, fake_node
from support.fake_engine import FakeEngine
from support.four_bits import engine_of
from support.reference import Prover

NAME = "tiny"
OPERATOR, VALIDATOR = "operators-key", "validators-key"
BUDGET = 10_000


class ModelEngine(FakeEngine):
    """A fake engine whose vectors the reference engine computes, by published weights or others."""

    def __init__(self, model: Path, processor: str = "a processor") -> None:
        published = load(model, "float32", "cpu")
        kernels = {"processor": processor, "dtype": "bfloat16"}
        super().__init__(EngineInfo((NAME,), published.facts, 512, {"vllm": "none"}, kernels))
        self.honest = Prover(with_kernels(published, own_profile(torch.bfloat16)))
        self.four_bits = engine_of(model, "bfloat16", four_bits=True)
        self.serves = self.honest

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        self.calls.append(tuple(nonces))
        async with self._one_call[core]:
            await asyncio.sleep(self.latency_s)
            # In a thread, so that the node answers other calls meanwhile.
            return await asyncio.to_thread(self._compute, work, nonces)

    def _compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        kept = [nonce for nonce in nonces if nonce not in self.not_finite]
        made = self.serves.compute(work, kept)
        failed = tuple(nonce for nonce in nonces if nonce in self.not_finite)
        return ProofBatch(made.nonces, np.asarray(made.values), failed)


class Meddling:
    """Changes the bodies of challenges before the node sees them, as its attributes say."""

    def __init__(self) -> None:
        self.reverses_block = False
        self.drops_nonce = False
        self.strips_signature = False
        self._app: ASGIApp

    def around(self, app: ASGIApp) -> ASGIApp:
        self._app = app
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("/generate"):
            content = self._changed(await _body(receive))
            length = (b"content-length", str(len(content)).encode())
            others = [each for each in scope["headers"] if each[0] != length[0]]
            scope = {**scope, "headers": [*others, length]}
            receive = _first({"type": "http.request", "body": content}, receive)

        async def sent(message: Message) -> None:
            if self.strips_signature and message["type"] == "http.response.start":
                name = ANSWER_HEADER.lower().encode()
                message["headers"] = [each for each in message["headers"] if each[0] != name]
            await send(message)

        await self._app(scope, receive, sent)

    def _changed(self, content: bytes) -> bytes:
        if not (self.reverses_block or self.drops_nonce):
            return content
        body = json.loads(content)
        if self.reverses_block:
            body["block_hash"] = body["block_hash"][::-1]
        if self.drops_nonce:
            body["nonces"].pop()
        return json.dumps(body).encode()


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message["body"])
        more = message.get("more_body", False)
    return b"".join(parts)


def _first(message: dict[str, Any], receive: Receive) -> Receive:
    waiting = [message]

    async def received() -> Any:
        return waiting.pop() if waiting else await receive()

    return received


@dataclass
class ChallengedNode:
    node: FakeNode
    engine: ModelEngine
    meddling: Meddling

    @property
    def url(self) -> str:
        return self.node.url


@contextmanager
def challenged_node(
    model: Path, folder: Path, processor: str = "a processor"
) -> Iterator[ChallengedNode]:
    engine, meddling = ModelEngine(model, processor), Meddling()
    keys = {"api_key": OPERATOR, "validator_key": VALIDATOR}
    options = {"challenge_nonces_per_hour": BUDGET, **keys}
    with fake_node(folder, engine, OPERATOR, meddling.around, **options) as node:
        yield ChallengedNode(node, engine, meddling)
