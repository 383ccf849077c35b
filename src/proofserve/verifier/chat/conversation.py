"""A chat as its client kept it, the asking for it, and the receipts of its answers."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.record import (
    LogEntry,
    SignedEntry,
    SignedReceipt,
    is_signed,
    require_chain,
)
from proofserve.remote.http import JsonClient, object_of
from proofserve.remote.prompts import prompt
from proofserve.remote.recorder import NOT_YET, now_ms
from proofserve.reports import NodeError, Progress, ReportedError, read_json, write_json
from proofserve.wire import RECEIPTS
from proofserve.wire.records import first_problem
from proofserve.wire.signed import signed_entry, signed_receipt, signed_receipt_body

CHAT = "/v1/chat/completions"
# A gateway's path for its own clients, then a node's.
RECEIPT_PATHS = ("/v1/receipts", RECEIPTS)
# A receipt enters the log within a second or two of its answer's end. A server that has it, and is
# too busy to sign it yet, says so.
RECEIPT_S, EXPECTED_S = 10.0, 120.0
POLL_S = 0.25
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
    return conversation(path.name, **dict(read_json(path, _File)))


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


class ReceiptClient(JsonClient):
    """A client of a gateway or a node."""

    def model(self) -> str:
        """The first of the models that the server names."""
        found = self.ask("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError) as error:
            raise NodeError(f"GET {self.url}/v1/models: it names no model") from error

    def chat(self, name: str, request: Mapping[str, Any]) -> Conversation:
        """The answer to ``request`` and its receipts; without them if none come in time.

        The request also asks for token ids, which a text alone does not tell. Raises ReportedError,
        naming the field, for an answer or a receipt that is none.
        """
        body = {**request, "return_token_ids": True}
        response = self.ask("POST", CHAT, body)
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
        name, began = quote(response_id, safe=""), time.monotonic()
        while True:
            statuses = set()
            for path in RECEIPT_PATHS:
                response = self.send("GET", f"{path}/{name}")
                if response.is_success:
                    return _list(object_of(response), "receipts", response.url)
                statuses.add(response.status_code)
            longest = EXPECTED_S if httpx.codes.TOO_EARLY in statuses else wait_s
            if not statuses <= NOT_YET or time.monotonic() - began > longest:
                return []
            time.sleep(POLL_S)

    def log(self, after: int = -1) -> list[SignedEntry]:
        """All entries of the node's log whose index is above ``after``."""
        entries: list[SignedEntry] = []
        while True:
            path = f"{RECEIPTS}/log?after={after}&limit={ENTRIES_AT_ONCE}"
            found = _list(self.ask("GET", path), "entries", self.url)
            try:
                entries += [signed_entry(each) for each in found]
            except ProtocolError as error:
                raise NodeError(f"{self.url}: log: {error}") from error
            if len(found) < ENTRIES_AT_ONCE:
                return entries
            if entries[-1].entry.index <= after:
                raise NodeError(f"{self.url}: log: it does not go on after entry {after}")
            after = entries[-1].entry.index


def _list(found: Mapping[str, Any], field: str, url: object) -> list[Any]:
    if not isinstance(listed := found.get(field), list):
        raise NodeError(f"{url}: {field} is no list")
    return listed


class PublicLog:
    """Entries in a row, signed by ``public_key``; the first may be any. Raises as ``add``.

    ``seen_ms`` says when the client's side first saw an entry, by its own clock.
    """

    def __init__(
        self,
        entries: Sequence[SignedEntry],
        public_key: bytes,
        seen_ms: Mapping[int, int] | None = None,
    ) -> None:
        self.public_key = public_key
        self.seen_ms = dict(seen_ms or {})
        self._entries: dict[int, LogEntry] = {}
        self.add(entries)

    @property
    def first(self) -> int | None:
        """The least index; None without entries."""
        return min(self._entries, default=None)

    @property
    def last(self) -> int | None:
        return max(self._entries, default=None)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, shown: Sequence[SignedEntry]) -> None:
        """Add ``shown``, which have the last known entry among them.

        Raises ProtocolError, and adds nothing, if they do not follow each other, a signature is
        not the node's, the node now shows another entry in the place of a known one (the log
        forks), or the last known one is gone.
        """
        require_chain([each.entry for each in shown])
        places = {each.entry.index for each in shown}
        if self.last is not None and self.last not in places:
            raise ProtocolError("log", f"it forks: entry {self.last} is gone")
        for each in shown:
            index, known = each.entry.index, self._entries.get(each.entry.index)
            if known is not None and known.hash != each.entry.hash:
                raise ProtocolError("log", f"it forks: the node showed another entry {index}")
            if known is None and not is_signed(each.entry.hash, each.signature, self.public_key):
                raise ProtocolError("entry_signature", f"entry {index} is not signed by this node")
        self._entries |= {each.entry.index: each.entry for each in shown}

    def require(self, entry: LogEntry) -> None:
        """Raise ProtocolError unless ``entry`` is the one in its place here."""
        known = self._entries.get(entry.index)
        if known is None:
            raise ProtocolError("log", f"it has no entry {entry.index}")
        if known.hash != entry.hash:
            raise ProtocolError("log", f"it forks: it has another entry {entry.index}")
