"""A node without a model: real HTTP, made-up numbers, and bad habits on request."""

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import StreamingResponse

from proofserve.protocol.codec import encode
from proofserve.rounds.status import EngineGauges

P = "/api/v1/pow"
# On a busy machine the clients of a steady load may all be between two chats for a moment.
HESITATION_S = 0.5


@dataclass
class Habits:
    """Speeds in nonces or tokens per second, and what is wrong with this node."""

    bare: float = 1000.0
    round: float = 1000.0
    chat_tokens: float = 5000.0
    stream_gap_s: float = 0.01
    """Between two events of a streamed answer; longer by ``loss`` while a round runs."""
    tokens_per_event: int = 1
    loss: float = 0.0
    share: float = 1.0
    """Of the engine's time, to proofs while a round runs; chat has the rest but ``idle``."""
    idle: float = 0.0
    cuts_streams: bool = False
    suffix: str = ""
    """Of every answer that is not streamed."""
    receipts: bool = True
    polite: bool = True
    resumes: bool = True
    truthful: bool = True
    repeatable: bool = True
    keyed: bool = True
    gullible: bool = False
    suspicious: bool = False
    counts_right: bool = True
    hooks_matter: bool = True
    other_block: int | None = 409
    drift: float = 0.0
    publishes_all: bool = False
    forgets: bool = False
    stuck_state: str | None = None
    chat_error: int | None = None
    finish_reason: str = "length"
    failing_nonce: int | None = None
    gauges: dict[str, Any] = field(default_factory=dict)
    looks_without_gauges: int = 0
    looks_with_old_gauges: int = 0
    api_key: str | None = None


class StubNode:
    """What the app serves and what it has been doing."""

    def __init__(self, habits: Habits) -> None:
        self.habits = habits
        self.app = FastAPI(dependencies=[Depends(self.guard)])
        self.rows: list[dict[str, Any]] = []
        self.state = "IDLE"
        self.rounds = 0
        self.chatting = 0
        self.chats = self.looks = 0
        self._quiet_s = HESITATION_S
        """Without chat, as far as ``compute`` has seen."""
        self.measured: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.unlogged: set[str] = set()
        """Ids of answers whose receipts the log does not have yet."""
        self._closing = threading.Event()
        self._work: dict[str, Any] = {}
        self._next = 0
        self.forwards = 0
        self._routes()

    # -- the engine --------------------------------------------------------------------------

    def vector(self, nonce: int, work: dict[str, Any]) -> str:
        draw = self._draw(nonce, work, work["params"]["model"])
        row = draw.normal(size=(1, work["params"]["k_dim"]))
        return encode((row / np.linalg.norm(row)).astype(np.float32))[0]

    def distance(self, nonce: int, work: dict[str, Any]) -> float:
        hooks = work["use_layer_hooks"] and self.habits.hooks_matter
        draw = self._draw(nonce, work, f"hooks {hooks}")
        return float(np.float32(draw.normal(2**0.5, 0.0078)))

    def _draw(self, nonce: int, work: dict[str, Any], kind: str) -> np.random.Generator:
        key = work["public_key"] if self.habits.keyed else ""
        text = f"{work['block_hash']}|{key}|{nonce}|{kind}"
        if not self.habits.repeatable:
            text += str(time.monotonic_ns())
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return np.random.default_rng(seed)

    def compute(self) -> None:
        """Store a batch at a time while a round runs; the body of a thread."""
        size = 10
        tick, chats = size / self.habits.round, 0
        while not self._closing.wait(tick):
            with self._lock:
                # Seconds of the clock would count those in which the whole process stood still.
                chatted = self.chatting > 0 or self.chats != chats
                self._quiet_s, chats = 0.0 if chatted else self._quiet_s + tick, self.chats
                if self._may_compute():
                    self._store(size)

    def _may_compute(self) -> bool:
        gives_way = self.habits.polite and self._quiet_s < HESITATION_S
        sulks = self.chats > 0 and not self.habits.resumes
        return self.state == "GENERATING" and not gives_way and not sulks

    def _store(self, size: int) -> None:
        for nonce in range(self._next, self._next + size):
            found = self._found(nonce)
            if found is not None:
                row = {"seq": len(self.rows) + 1, "round_id": str(self.rounds), "nonce": nonce}
                self.rows.append({**row, **found})
        self._next += size
        self.forwards += 1

    def _found(self, nonce: int) -> dict[str, Any] | None:
        """What is to be stored about ``nonce``, if anything."""
        if nonce == self.habits.failing_nonce:
            return {"error": "not finite"}
        if "params" in self._work:
            return {"vector_b64": self.vector(nonce, self._work)}
        distance = self.distance(nonce, self._work)
        wins = self.habits.publishes_all or distance < self._work["r_target"]
        return {"dist": distance} if wins else None

    def close(self) -> None:
        self._closing.set()

    # -- HTTP --------------------------------------------------------------------------------

    async def guard(self, request: Request) -> None:
        key = self.habits.api_key
        asks = key is not None and request.url.path.startswith(P)
        if asks and request.headers.get("authorization") != f"Bearer {key}":
            raise HTTPException(401, "this server asks for a key")

    def _routes(self) -> None:
        for method, path, handler in (
            ("GET", "/v1/models", self.models),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.prefill),
            ("GET", f"{P}/versions", self.versions),
            ("GET", f"{P}/status", self.status),
            ("POST", f"{P}/init/generate", self.start),
            ("POST", f"{P}/init", self.init),
            ("POST", f"{P}/init/validate", self.init_validate),
            ("POST", f"{P}/phase/generate", self.phase_generate),
            ("POST", f"{P}/phase/validate", self.phase_validate),
            ("POST", f"{P}/validate", self.judge),
            ("POST", f"{P}/stop", self.stop),
            ("GET", f"{P}/results", self.results),
            ("POST", f"{P}/generate", self.generate),
            ("POST", f"{P}/measure", self.measure),
            ("GET", "/api/v1/receipts/{response_id}", self.receipts),
        ):
            self.app.add_api_route(path, handler, methods=[method])

    def models(self) -> dict[str, Any]:
        return {"data": [{"id": "stub"}]}

    def versions(self) -> dict[str, Any]:
        return {"vllm_version": "0", "versions": {"vllm": "0"}}

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        if self.habits.chat_error is not None:
            raise HTTPException(self.habits.chat_error, "no chat today")
        if body.get("stream"):
            return StreamingResponse(self._streamed(body), media_type="text/event-stream")
        tokens, said = body["max_tokens"], body["messages"][0]["content"]
        words = len(said.split())
        await self._busy((words + tokens) / self.habits.chat_tokens)
        if not self.habits.truthful and self.state == "GENERATING":
            said += "!"
        said += self.habits.suffix
        choice = {"finish_reason": self.habits.finish_reason, "message": {"content": said}}
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        name = f"chatcmpl-{self.chats}"
        self.unlogged.add(name)
        return {"id": name, "choices": [choice], "usage": usage}

    async def receipts(self, response_id: str) -> dict[str, Any]:
        if not self.habits.receipts:
            raise HTTPException(404, "no receipts")
        if response_id in self.unlogged:
            self.unlogged.remove(response_id)
            raise HTTPException(425, "not logged yet")
        return {"receipts": [{"of": response_id}]}

    async def _streamed(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Events as vLLM sends them: first one without a token, last one without a choice."""
        counted = body["stream_options"].get("continuous_usage_stats", False)

        def event(done: int, choices: list[dict[str, Any]]) -> str:
            usage = {"prompt_tokens": 1, "completion_tokens": done}
            return (
                f"data: {json.dumps({'choices': choices, 'usage': usage if counted else None})}\n\n"
            )

        yield event(0, [{"delta": {"role": "assistant"}, "finish_reason": None}])
        done, tokens = 0, body["max_tokens"]
        while done < tokens:
            slower = 1 - self.habits.loss if self.state == "GENERATING" else 1.0
            await self._busy(self.habits.stream_gap_s / slower)
            done = min(tokens, done + self.habits.tokens_per_event)
            reason = self.habits.finish_reason if done == tokens else None
            yield event(done, [{"delta": {"content": "x"}, "finish_reason": reason}])
            if self.habits.cuts_streams:
                return
        yield event(done, [])
        yield "data: [DONE]\n\n"

    async def prefill(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        sizes = [len(prompt) for prompt in body["prompt"]]
        await self._busy(sum(sizes) / self.habits.chat_tokens)
        return {
            "choices": [{"finish_reason": "length", "text": "x"} for _ in sizes],
            "usage": {"prompt_tokens": sum(sizes), "completion_tokens": len(sizes)},
        }

    async def _busy(self, seconds: float) -> None:
        self.chatting += 1
        self.chats += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self.chatting -= 1

    def status(self) -> dict[str, Any]:
        with self._lock:
            mine = [row for row in self.rows if row["round_id"] == str(self.rounds)]
            wrong = 0 if self.habits.counts_right else 1
            self.looks += 1
            shown = self.looks > self.habits.looks_without_gauges
            return {
                "status": self.habits.stuck_state or self.state,
                "config": self._config(),
                "stats": {
                    "total_processed": self._next + wrong,
                    "total_found": sum("error" not in row for row in mine) + wrong,
                    "nonces_per_second": 1.0,
                    "failed": 0,
                },
                "round_id": str(self.rounds),
                "engine": self.gauges() if shown else None,
            }

    def _config(self) -> dict[str, Any] | None:
        if not self.rounds:
            return None
        names = ("block_hash", "public_key", "node_id", "node_count")
        config = {name: self._work[name] for name in names}
        return {**config, **self._work.get("params", {"seq_len": self._work.get("seq_len")})}

    def gauges(self) -> dict[str, Any]:
        active = time.monotonic() if self.state == "GENERATING" else 0.0
        names = dict.fromkeys(EngineGauges.__dataclass_fields__, 0)
        measured = {
            "busy_s": self.habits.share * active,
            "deferred_s": (1 - self.habits.share - self.habits.idle) * active,
            "forwards": self.forwards,
            "resume_ms": [7.0, 8.0, 9.0] if self.habits.polite else [7.0, 0.1, 8.0],
            "age_s": 0.7 if self.looks <= self.habits.looks_with_old_gauges else 0.0,
        }
        return {**names, **measured, **self.habits.gauges}

    async def start(self, request: Request) -> dict[str, Any]:
        return self._configure(await request.json(), "GENERATING")

    async def init(self, request: Request) -> dict[str, Any]:
        return self._configure(await request.json(), "IDLE")

    async def init_validate(self, request: Request) -> dict[str, Any]:
        return self._configure(await request.json(), "VALIDATING")

    def _configure(self, work: dict[str, Any], state: str) -> dict[str, Any]:
        with self._lock:
            if self.state == "GENERATING":
                raise HTTPException(409, "Already generating")
            self.state, self._work, self._next = state, work, 0
            self.rounds += 1
        return {"status": "OK", "pow_status": {"status": state}}

    def phase_generate(self) -> dict[str, Any]:
        return self._change("GENERATING")

    def phase_validate(self) -> dict[str, Any]:
        return self._change("VALIDATING")

    def _change(self, state: str) -> dict[str, Any]:
        with self._lock:
            self.state = state
        return {"status": "OK", "pow_status": {"status": state}}

    async def judge(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        same_block = body["block_hash"] == self._work["block_hash"]
        if self.habits.other_block is not None and not same_block:
            raise HTTPException(self.habits.other_block, "block_hash is another one")
        work = {**self._work, "public_key": body["public_key"]}
        computed = [self.distance(nonce, work) + self.habits.drift for nonce in body["nonces"]]
        target = work["r_target"]
        pairs = zip(body["dist"], computed, strict=True)
        wrong = sum(theirs >= target or ours > target for theirs, ours in pairs)
        if self.habits.gullible:
            wrong = 0
        if self.habits.suspicious:
            wrong = len(computed)
        return {
            "computed_distances": computed[1:] if self.habits.forgets else computed,
            "n_invalid": wrong,
            "probability_honest": 0.0 if wrong else 1.0,
            "fraud_detected": bool(wrong),
        }

    def stop(self) -> dict[str, Any]:
        return self._change("STOPPED")

    def results(self, after: int = 0, limit: int = Query(1000, le=10_000)) -> dict[str, Any]:
        with self._lock:
            rows = self.rows[after : after + limit]
        return {"results": rows, "next_after": rows[-1]["seq"] if rows else after}

    async def generate(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        if body.get("scheme") not in {None, "artifact-v1"}:
            raise HTTPException(409, {"error": "scheme mismatch"})
        ours = {nonce: self.vector(nonce, body) for nonce in body["nonces"]}
        if body.get("validation") is None:
            failed = [{"nonce": n, "error": "NaN"} for n in ours if n == self.habits.failing_nonce]
            artifacts = [{"nonce": n, "vector_b64": text} for n, text in ours.items()]
            return {"status": "completed", "artifacts": artifacts, "failed": failed}
        claimed = {a["nonce"]: a["vector_b64"] for a in body["validation"]["artifacts"]}
        wrong = [nonce for nonce in ours if claimed[nonce] != ours[nonce]]
        if self.habits.gullible:
            wrong = []
        if self.habits.suspicious:
            wrong = list(ours)
        return {
            "n_total": len(ours),
            "n_mismatch": len(wrong),
            "mismatch_nonces": wrong,
            "p_value": 0.0 if wrong else 1.0,
            "fraud_detected": bool(wrong),
        }

    async def measure(self, request: Request) -> dict[str, Any]:
        body = await request.json()
        self.measured.append(body)
        return {
            "nonces_per_second": self.habits.bare,
            "seconds_per_forward": 8 / self.habits.bare,
            "sequences": 8,
        }


@contextmanager
def stub_node(habits: Habits | None = None) -> Iterator[tuple[StubNode, str]]:
    """A stub that listens, and its URL."""
    node = StubNode(habits or Habits())
    config = uvicorn.Config(
        node.app,
        port=0,
        log_level="critical",
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    threads = [threading.Thread(target=server.run), threading.Thread(target=node.compute)]
    for thread in threads:
        thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield node, f"http://127.0.0.1:{port}"
    finally:
        node.close()
        server.should_exit = True
        for thread in threads:
            thread.join()
