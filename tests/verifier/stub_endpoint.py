"""An OpenAI-compatible server over real HTTP that answers from a reference network."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from numpy.typing import NDArray
from transformers import AutoTokenizer, DynamicCache

from proofserve.engines.reference.forward import logits_of
from proofserve.engines.reference.network import Network, load
from support.decoders import decoder_of

OWN_FIELDS = {"return_token_ids", "return_tokens_as_token_ids", "top_k", "min_p"}
NAME = "stub"


class Writer:
    """Writes answers as a server does: in bfloat16, token by token with a cache of keys."""

    def __init__(self, model: Path, change: Callable[[Network], Network] = lambda of: of) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._network = change(load(model, "bfloat16", "cpu"))
        self._decoder = decoder_of(self._network)
        self._known: dict[Any, tuple[list[int], NDArray[np.float32]]] = {}
        self._lock = threading.Lock()

    def write(
        self, prompt: list[int], tokens: int, greedy: bool
    ) -> tuple[list[int], NDArray[np.float32]]:
        """Ids, and the log-probabilities [n, vocabulary] of every place."""
        key = (*prompt, tokens, greedy)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._written(prompt, tokens, greedy)
            return self._known[key]

    @torch.inference_mode()
    def _written(
        self, prompt: list[int], tokens: int, greedy: bool
    ) -> tuple[list[int], NDArray[np.float32]]:
        draw = torch.Generator().manual_seed(hash(tuple(prompt)) % 2**31)
        cache, read, ids, rows = DynamicCache(), prompt, [], []
        while len(ids) < tokens:
            out = self._decoder(
                input_ids=torch.tensor([read]), past_key_values=cache, use_cache=True
            )
            logits = logits_of(self._network, out.last_hidden_state[0, -1])
            logs = torch.log_softmax(logits, -1)
            best = logs.argmax() if greedy else torch.multinomial(logs.exp(), 1, generator=draw)[0]
            read = [int(best)]
            ids += read
            rows.append(logs.numpy())
            if read[0] == self.tokenizer.eos_token_id:
                break
        return ids, np.stack(rows)


@dataclass
class Manners:
    """What this server gives, and how it misbehaves.

    ``most_logs`` is the largest number of log-probabilities that it takes; 0 for none. ``strict``
    refuses fields that OpenAI has not. ``busy`` are Retry-After headers of its next answers, None
    for 429 without one. ``spoil`` changes a body before it is sent.
    """

    most_logs: int = 20
    ids: bool = True
    strict: bool = False
    chat: bool = True
    key: str | None = None
    busy: list[str | None] = field(default_factory=list)
    spoil: Callable[[dict[str, Any]], bytes | None] = lambda _body: None
    more_prompt: int = 0
    status: int = 200


class StubEndpoint:
    """``bodies`` are the requests for text that it got, refused ones too."""

    def __init__(self, writer: Writer, manners: Manners) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at: list[float] = []
        self.app = FastAPI()
        self._writer, self._manners = writer, manners
        self.app.add_api_route("/v1/models", self.models)
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])

    def models(self, request: Request) -> Response:
        return self._refusal(request) or _json({"data": [{"id": NAME}, {"id": "second"}]})

    def chat(self, request: Request, body: dict[str, Any]) -> Response:
        if not self._manners.chat:
            return _json({"error": "no chat template"}, 400)
        ids = self._writer.tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        top = body.get("top_logprobs", 0)
        return self._answer(request, body, ids, top, self._of_chat)

    def complete(self, request: Request, body: dict[str, Any]) -> Response:
        ids = self._writer.tokenizer.encode(body["prompt"])
        return self._answer(request, body, ids, body.get("logprobs", 0), self._of_text)

    def _refusal(self, request: Request) -> Response | None:
        key = self._manners.key
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            return _json({"error": "bad key"}, 401)
        return None

    def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        prompt: list[int],
        top: int,
        shape: Callable[..., dict[str, Any]],
    ) -> Response:
        self.bodies.append(body)
        self.at.append(time.monotonic())
        manners = self._manners
        if refused := self._refusal(request):
            return refused
        if manners.busy:
            wait = manners.busy.pop(0)
            return _json({"error": "busy"}, 429, {} if wait is None else {"Retry-After": wait})
        if top > manners.most_logs or (manners.strict and OWN_FIELDS & set(body)):
            return _json({"error": "unknown or wrong field"}, 400)
        if manners.status != 200:
            return _json({"error": "broken"}, manners.status)
        ids, logs = self._writer.write(prompt, body["max_tokens"], body["temperature"] == 0)
        own = manners.ids and not manners.strict
        text = self._writer.tokenizer.decode(ids, skip_special_tokens=True)
        choice = shape(text, ids, logs, top, own)
        ended = ids[-1] == self._writer.tokenizer.eos_token_id
        choice |= {"index": 0, "finish_reason": "stop" if ended else "length"}
        if own:
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        read = len(prompt) + manners.more_prompt
        made = {"choices": [choice]}
        made["usage"] = {"prompt_tokens": read, "completion_tokens": len(ids)}
        spoilt = manners.spoil(made)
        return Response(spoilt, media_type="application/json") if spoilt else _json(made)

    def _name(self, token: int, own: bool) -> str:
        return f"token_id:{token}" if own else self._writer.tokenizer.decode([token])

    def _of_chat(self, text: str, ids: Any, logs: Any, top: int, own: bool) -> dict[str, Any]:
        content = []
        for token, row in zip(ids, logs, strict=True):
            tops = [
                {"token": self._name(int(i), own), "logprob": float(row[i])}
                for i in np.argsort(-row)[:top]
            ]
            each = {"token": self._name(token, own), "logprob": float(row[token])}
            content.append({**each, "top_logprobs": tops})
        logprobs = {"content": content} if top else None
        return {"message": {"role": "assistant", "content": text}, "logprobs": logprobs}

    def _of_text(self, text: str, ids: Any, logs: Any, top: int, own: bool) -> dict[str, Any]:
        if not top:
            return {"text": text, "logprobs": None}
        tops = [
            {self._name(int(i), own): float(row[i]) for i in np.argsort(-row)[:top]} for row in logs
        ]
        lists = {
            "tokens": [self._name(token, own) for token in ids],
            "token_logprobs": [float(row[token]) for token, row in zip(ids, logs, strict=True)],
            "top_logprobs": tops,
        }
        return {"text": text, "logprobs": lists}


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(body), status, headers, "application/json")


@contextmanager
def stub_endpoint(
    writer: Writer, manners: Manners | None = None
) -> Iterator[tuple[StubEndpoint, str]]:
    """A stub that listens, and its URL."""
    stub = StubEndpoint(writer, manners or Manners())
    config = uvicorn.Config(stub.app, port=0, log_level="critical", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield stub, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
