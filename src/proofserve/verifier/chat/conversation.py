"""A chat as its client kept it, the asking for it, and the receipts of its answers."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SignedEntry, SignedReceipt
from proofserve.remote.chats import prompt
from proofserve.remote.recorder import NOT_YET, now_ms
from proofserve.reports import NodeError, Progress, ReportedError, read_json, write_json
from proofserve.wire import RECEIPTS
from proofserve.wire.records import first_problem
from proofserve.wire.signed import signed_entry, signed_receipt, signed_receipt_body

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# A gateway's path for its own clients, then a node's.
RECEIPT_PATHS = ("/v1/receipts", RECEIPTS)
TIMEOUT_S = 300.0
# A receipt enters the log within a second or two of its answer's end. A server that has it, and is
# too busy to sign it yet, says so.
RECEIPT_S, EXPECTED_S = 10.0, 120.0
POLL_S = 0.25
LONGEST_TEXT = 300
ENTRIES_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer of a response; ``token_ids`` are None unless the client asked for them.

    ``split`` says that ``text`` is only a part: the server put reasoning or calls of tools apart.
    ``reasoning`` is empty if there was none.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...] | None
    split: bool = False
    reasoning: str = ""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """``request`` is the body that the client sent; ``receipts`` one for each choice, or none.

    By the client's own clock, Unix time in milliseconds: the answer ended at ``ended_ms``, and the
    client had its receipts at ``seen_ms``. None if it did not note it.
    """

    name: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    response_id: str
    choices: tuple[ChatChoice, ...]
    receipts: tuple[SignedReceipt, ...]
    ended_ms: int | None = None
    seen_ms: int | None = None

    @property
    def without_receipt(self) -> int:
        """How many choices have no receipt."""
        stated = {each.receipt.choice for each in self.receipts}
        return sum(choice.index not in stated for choice in self.choices)


_TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
_Milliseconds = Annotated[int, Field(strict=True, ge=0)]


class _MessageBody(BaseModel):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _ChoiceBody(BaseModel):
    index: int = Field(ge=0)
    message: _MessageBody | None = None
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    finish_reason: str | None = None

    def to_choice(self) -> ChatChoice:
        ids = None if self.token_ids is None else tuple(self.token_ids)
        message = self.message or _MessageBody(content=self.text)
        apart = message.reasoning or message.reasoning_content
        reasoning = apart if isinstance(apart, str) else ""
        split = bool(apart or message.tool_calls)
        return ChatChoice(self.index, message.content, ids, split, reasoning, self.finish_reason)


class _Response(BaseModel):
    id: str = Field(min_length=1)
    choices: list[_ChoiceBody] = Field(min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    request: dict[str, Any]
    response: dict[str, Any]
    receipts: list[dict[str, Any]]
    ended_ms: _Milliseconds | None = None
    seen_ms: _Milliseconds | None = None


def conversation(
    name: str,
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    receipts: list[Any],
    ended_ms: int | None = None,
    seen_ms: int | None = None,
) -> Conversation:
    """Raises ReportedError naming the field that is wrong; ``name`` stands before it."""
    try:
        parsed = _Response.model_validate(response)
    except ValidationError as error:
        where, why = first_problem(error)
        raise ReportedError(f"{name}: response.{where}: {why}") from error
    signed = []
    for number, body in enumerate(receipts):
        try:
            signed.append(signed_receipt(body))
        except ProtocolError as error:
            raise ReportedError(f"{name}: receipts.{number}: {error}") from error
    choices = tuple(each.to_choice() for each in parsed.choices)
    _require_once(f"{name}: response.choices: index", [str(each.index) for each in choices])
    # The evidence of an answer counts once.
    stated = [f"{each.receipt.choice} of {each.receipt.response_id}" for each in signed]
    _require_once(f"{name}: receipts: choice", stated)
    asked = (name, request, response, parsed.id)
    return Conversation(*asked, choices, tuple(signed), ended_ms, seen_ms)


def read(path: Path) -> Conversation:
    """The chat in a file of ``write``. Raises ReportedError naming the field that is wrong."""
    found = read_json(path, _File)
    kept = (found.request, found.response, found.receipts, found.ended_ms, found.seen_ms)
    return conversation(path.name, *kept)


def write(path: Path, chat: Conversation) -> None:
    receipts = [signed_receipt_body(each) for each in chat.receipts]
    body = {"request": dict(chat.request), "response": dict(chat.response), "receipts": receipts}
    write_json(path, {**body, "ended_ms": chat.ended_ms, "seen_ms": chat.seen_ms})


def _require_once(where: str, found: list[str]) -> None:
    for each, times in Counter(found).items():
        if times > 1:
            raise ReportedError(f"{where} {each} is there {times} times")


def requests(model: str, seed: int, count: int, max_tokens: int) -> list[Mapping[str, Any]]:
    """``count`` requests; every second one is greedy. Other seeds give other prompts."""
    return [request(model, seed * count + n, max_tokens, greedy=n % 2 == 1) for n in range(count)]


def request(model: str, number: int, max_tokens: int, *, greedy: bool) -> Mapping[str, Any]:
    """For exactly ``max_tokens`` tokens. It states all parameters: servers have other defaults."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "ignore_eos": True,
    }


class ReceiptClient:
    """A client of a gateway or a node; ``api_key`` is the client's own.

    Raises ReportedError for a URL that is none. Its methods raise NodeError with the server's own
    text.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S, headers=headers)
        except httpx.InvalidURL as error:
            raise ReportedError(f"{url}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def model(self) -> str:
        """The first of the models that the server names."""
        found = _object(self._good("GET", "/v1/models"))
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise NodeError(f"GET {self.url}/v1/models: it names no model") from error

    def chat(self, name: str, request: Mapping[str, Any], path: str = CHAT) -> Conversation:
        """The answer to ``request`` and its receipts; without them if none come in time.

        The request also asks for token ids, which a text alone does not tell. Raises ReportedError,
        naming the field, for an answer or a receipt that is none.
        """
        body = {**request, "return_token_ids": True}
        response = _object(self._good("POST", path, body))
        ended_ms = now_ms()
        answered = conversation(name, body, response, [])
        receipts = self.receipts(answered.response_id)
        return conversation(name, body, response, receipts, ended_ms, now_ms())

    def chats(
        self, requests: Sequence[Mapping[str, Any]], at_once: int, progress: Progress
    ) -> list[Conversation]:
        """The conversations of ``requests``, in their order."""
        progress.step(f"asking {len(requests)} chats", len(requests))

        def ask(number: int) -> Conversation:
            found = self.chat(f"chat {number}", requests[number])
            progress.advance()
            return found

        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, range(len(requests))))

    def receipts(self, response_id: str, wait_s: float = RECEIPT_S) -> list[Any]:
        """The signed receipts of a response, as the server sent them; none if none come in time."""
        began = time.monotonic()
        while True:
            statuses = []
            for path in RECEIPT_PATHS:
                response = self._sent("GET", f"{path}/{quote(response_id, safe='')}")
                if response.is_success:
                    return _list(response, "receipts")
                statuses.append(response.status_code)
            longest = EXPECTED_S if httpx.codes.TOO_EARLY in statuses else wait_s
            if not NOT_YET.issuperset(statuses) or time.monotonic() - began > longest:
                return []
            time.sleep(POLL_S)

    def log(self, after: int = -1) -> list[SignedEntry]:
        """All entries of the node's log whose index is above ``after``."""
        entries: list[SignedEntry] = []
        while True:
            path = f"{RECEIPTS}/log?after={after}&limit={ENTRIES_AT_ONCE}"
            found = _list(self._good("GET", path), "entries")
            try:
                entries += [signed_entry(each) for each in found]
            except ProtocolError as error:
                raise NodeError(f"{self.url}: log: {error}") from error
            if len(found) < ENTRIES_AT_ONCE:
                return entries
            if entries[-1].entry.index <= after:
                raise NodeError(f"{self.url}: log: it does not go on after entry {after}")
            after = entries[-1].entry.index

    def _good(self, method: str, path: str, body: Any = None) -> httpx.Response:
        response = self._sent(method, path, body)
        if response.is_error:
            status, text = response.status_code, response.text[:LONGEST_TEXT]
            raise NodeError(f"{method} {self.url}{path}: {status} {text}", status)
        return response

    def _sent(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise NodeError(f"{method} {self.url}{path}: {reason}") from error


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        found = response.json()
    except ValueError as error:
        raise NodeError(f"{response.url}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise NodeError(f"{response.url}: the answer is no object")
    return found


def _list(response: httpx.Response, field: str) -> list[Any]:
    found = _object(response).get(field)
    if not isinstance(found, list):
        raise NodeError(f"{response.url}: {field} is no list")
    return found
