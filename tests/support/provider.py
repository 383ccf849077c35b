"""A provider of chat over real HTTP that signs receipts with a real key. It runs no model."""

import gzip
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from proofserve.protocol.codec import to_float16
from proofserve.protocol.receipts.record import (
    LogEntry,
    Receipt,
    Sampling,
    SignedEntry,
    SignedReceipt,
    SigningKey,
    inclusions,
    next_entry,
    token_hash,
)
from proofserve.verifier.chat.conversation import Conversation, conversation
from proofserve.wire.signed import signed_entry_body, signed_receipt_body

CREATED_MS = 1_700_000_000_000
# By the client's clock, after an answer's end.
SEEN_AFTER_MS = 2000
WEIGHTS = "ab" * 32
K_DIM = 16
END = 1


class Characters:
    """A tokenizer with one id for each character; id 1 ends an answer, id 2 is "ab" in one."""

    tells_time = has_channels = False
    end_ids = (END,)

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        messages = request.get("messages")
        if messages is None:
            return tuple(request["prompt"])
        return self.answer_ids("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def answer_ids(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def text(self, ids: tuple[int, ...]) -> str:
        return "".join({END: "", 2: "ab"}.get(each, chr(each)) for each in ids)


TOKENIZER = Characters()


@dataclass
class Node:
    """Signs receipts, and has a log with an entry for each."""

    key: SigningKey = field(default_factory=SigningKey.new)
    entries: list[LogEntry] = field(default_factory=list)
    clock_ms: int = CREATED_MS

    def receipt(
        self, response_id: str, request: Mapping[str, Any], ids: Sequence[int], **changes: Any
    ) -> Receipt:
        prompt = TOKENIZER.prompt_ids(request)
        draw = np.random.default_rng(len(ids))
        fields: dict[str, Any] = {
            "response_id": response_id,
            "choice": 0,
            "model": "toy",
            "adapter": None,
            "weights_digest": WEIGHTS,
            "sampling": Sampling(temperature=float(request.get("temperature") or 0.0)),
            "prompt_tokens": len(prompt),
            "prompt_sha256": token_hash(prompt),
            "output_tokens": len(ids),
            "output_sha256": token_hash(ids),
            "sketch_key": "2026-01-01-00",
            "k_dim": K_DIM,
            "sketches": to_float16(draw.normal(size=(len(ids), K_DIM))).tobytes(),
            "finish_reason": "stop",
            "versions": (("proofserve", "0"),),
            "created_ms": self.clock_ms,
        }
        return Receipt(**(fields | changes))

    def sign(self, receipt: Receipt, late_ms: int = 1000) -> SignedReceipt:
        """Signed, and in a new entry of the log, ``late_ms`` after the receipt."""
        digests, at = [receipt.digest], receipt.created_ms + late_ms
        entry = next_entry(self.entries[-1] if self.entries else None, digests, at)
        self.entries.append(entry)
        self.clock_ms += 1000
        return SignedReceipt(
            receipt,
            self.key.public_key,
            self.key.sign(receipt.digest),
            inclusions(entry, digests)[0],
            self.key.sign(entry.hash),
        )

    def log(self) -> list[SignedEntry]:
        return [SignedEntry(each, self.key.sign(each.hash)) for each in self.entries]

    def chat(self, name: str, text: str = "hello", **changes: Any) -> Conversation:
        """A chat that this node answers; ``changes`` are of its receipt."""
        request = {"messages": [{"role": "user", "content": name}], "temperature": 0.5}
        ids = (*TOKENIZER.answer_ids(text), END)
        made = self.receipt(name, request, ids, **changes)
        choice = {"index": 0, "message": {"content": text}, "token_ids": list(ids)}
        response = {"id": name, "choices": [choice]}
        signed = [signed_receipt_body(self.sign(made))]
        ended_ms = made.created_ms
        return conversation(name, request, response, signed, ended_ms, ended_ms + SEEN_AFTER_MS)


def with_receipt(chat: Conversation, signed: SignedReceipt) -> Conversation:
    return replace(chat, receipts=(signed,))


@dataclass
class Habits:
    """``before`` are statuses of receipts before the good one; ``raw`` is said in its place.

    ``cut`` ends a stream so many events early. The first chats wait until there are ``together``.
    The log forks after so many chats, and the first ``broken_logs`` answers of it are none.
    ``failing`` are statuses of the first chats.
    """

    before: list[int] = field(default_factory=list)
    gone: int | None = None
    raw: bytes | None = None
    zipped: bool = False
    status: int = 200
    failing: list[int] = field(default_factory=list)
    refuses_fields: bool = False
    cut: int = 0
    finish: str | None = "stop"
    error: bool = False
    ignores_after: bool = False
    together: int = 1
    forks_after: int | None = None
    broken_logs: int = 0
    text: str = "answer to {}"
    response_id: str | None = None


class Provider:
    """``bodies`` are requests as they came, ``sent`` the bytes of the answers."""

    def __init__(self, habits: Habits) -> None:
        self.habits, self.node = habits, Node()
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.sent: list[bytes] = []
        self.asking = self.most_at_once = 0
        self._receipts: dict[str, list[SignedReceipt]] = {}
        self._lock = threading.Condition()
        self.app = FastAPI()
        for path in ("/v1/chat/completions", "/v1/completions"):
            self.app.add_api_route(path, self.answer, methods=["POST"])
        for path in ("/v1/receipts", "/api/v1/receipts"):
            self.app.add_api_route(f"{path}/log", self.log)
            self.app.add_api_route(f"{path}/{{response_id}}", self.receipt)
        self.app.add_api_route("/v1/models", lambda: {"data": [{"id": "toy"}]})
        self.app.add_api_route("/v1/embeddings", self.other, methods=["POST"])

    async def other(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    def answer(self, body: dict[str, Any], request: Request) -> Response:
        habits = self.habits
        self.bodies.append(body)
        with self._lock:
            self.asking += 1
            self.most_at_once = max(self.most_at_once, self.asking)
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.most_at_once >= habits.together, 60)
            self.asking -= 1
            number = len(self._receipts)
            response_id = habits.response_id or f"chatcmpl-{number}"
            self._receipts.setdefault(response_id, [])
        status = habits.failing.pop(0) if habits.failing else habits.status
        if status != 200:
            return Response(b'{"error": "broken"}', status)
        if habits.refuses_fields and "return_token_ids" in body:
            return Response(b'{"error": "unknown field"}', 400)
        chat = request.url.path.endswith("/chat/completions")
        choices = [self._choice(response_id, body, n) for n in range(body.get("n") or 1)]
        whole = {"id": response_id, "object": "x", "created": 0, "model": "toy"}
        packing = {"Content-Encoding": "gzip"} if habits.zipped else {}
        if body.get("stream"):
            parts = _events(whole, choices, chat, habits)
            self.sent.append(b"".join(parts))
            if habits.zipped:
                packed = gzip.compress(b"".join(parts))
                parts = [packed[n : n + 50] for n in range(0, len(packed), 50)]
            return StreamingResponse(iter(parts), 200, packing, "text/event-stream")
        shown = [_shown(each, chat, habits) for each in choices]
        raw = json.dumps({**whole, "choices": shown}, indent=1).encode()
        self.sent.append(raw)
        raw = gzip.compress(raw) if habits.zipped else raw
        return Response(raw, 200, packing, "application/json")

    def _choice(self, response_id: str, body: dict[str, Any], index: int) -> dict[str, Any]:
        asked = body["messages"][-1]["content"] if "messages" in body else "text"
        text = self.habits.text.format(asked) + "!" * index
        ids = [*TOKENIZER.answer_ids(text), END]
        if "messages" in body:
            made = self.node.receipt(response_id, body, ids, choice=index)
            with self._lock:
                self._receipts[response_id].append(self.node.sign(made))
        return {"index": index, "text": text, "ids": ids if body.get("return_token_ids") else None}

    def receipt(self, response_id: str, request: Request) -> Response:
        habits = self.habits
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        if habits.gone is not None:
            return Response(b"{}", habits.gone)
        if request.url.path.startswith("/v1/"):
            return Response(b"{}", 404)
        if habits.before:
            return Response(b"{}", habits.before.pop(0))
        if habits.raw is not None:
            return Response(habits.raw)
        found = [signed_receipt_body(each) for each in self._receipts[response_id]]
        return Response(json.dumps({"receipts": found}))

    def log(self, after: int = -1, limit: int = 1000) -> dict[str, Any]:
        habits, node = self.habits, self.node
        if habits.broken_logs:
            habits.broken_logs -= 1
            return {}
        if habits.forks_after is not None and len(self.bodies) >= habits.forks_after:
            node = Node(node.key)
            for number in range(len(self.node.entries)):
                node.chat(f"other {number}")
        from_ = -1 if habits.ignores_after else after
        found = [each for each in node.log() if each.entry.index > from_]
        return {"entries": [signed_entry_body(each) for each in found[:limit]]}


def _shown(choice: dict[str, Any], chat: bool, habits: Habits) -> dict[str, Any]:
    made: dict[str, Any] = {"index": choice["index"], "finish_reason": habits.finish}
    message = {"role": "assistant", "content": choice["text"]}
    made |= {"message": message} if chat else {"text": choice["text"]}
    return made if choice["ids"] is None else {**made, "token_ids": choice["ids"]}


def _events(
    whole: dict[str, Any], choices: list[dict[str, Any]], chat: bool, habits: Habits
) -> list[bytes]:
    """One event for each character, of all choices in turn, as servers stream them."""
    made: list[dict[str, Any]] = []
    for place in range(max(len(each["text"]) for each in choices) + 1):
        for each in choices:
            if place <= len(each["text"]):
                text = each["text"][place : place + 1]
                ended = place == len(each["text"])
                part = {"delta": {"content": text}} if chat else {"text": text}
                part |= {"index": each["index"], "finish_reason": habits.finish if ended else None}
                if each["ids"] is not None:
                    part["token_ids"] = [each["ids"][place]]
                made.append({**whole, "choices": [part]})
    if habits.error:
        made.append({"error": {"message": "the engine died"}})
    lines = [f"data: {json.dumps(each)}\n\n".encode() for each in made]
    return [*lines, b"data: [DONE]\n\n"][: len(lines) + 1 - habits.cut]


@contextmanager
def provider(**habits: Any) -> Iterator[tuple[Provider, str]]:
    """A provider that listens, and its URL."""
    made = Provider(Habits(**habits))
    config = uvicorn.Config(made.app, port=0, log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield made, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
