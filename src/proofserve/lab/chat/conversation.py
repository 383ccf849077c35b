"""A chat as its client kept it: the request, the response, and the receipts of its answers."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proofserve.lab.client.errors import LabError
from proofserve.lab.report.json_files import read_json, write_json
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SignedReceipt
from proofserve.wire.receipts import signed_receipt, signed_receipt_body


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer of a response; ``token_ids`` are None unless the client asked for them.

    ``split`` says that ``text`` is only a part: the server put reasoning or calls of tools apart.
    """

    index: int
    text: str | None
    finish_reason: str | None
    token_ids: tuple[int, ...] | None
    split: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """``request`` is the body that the client sent; ``receipts`` one for each choice, or none."""

    name: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    response_id: str
    choices: tuple[ChatChoice, ...]
    receipts: tuple[SignedReceipt, ...]

    @property
    def without_receipt(self) -> int:
        """How many choices have no receipt."""
        stated = {each.receipt.choice for each in self.receipts}
        return sum(choice.index not in stated for choice in self.choices)


_TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]


class _MessageBody(BaseModel):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None

    @property
    def split(self) -> bool:
        return bool(self.reasoning or self.reasoning_content or self.tool_calls)


class _ChoiceBody(BaseModel):
    index: int = Field(ge=0)
    message: _MessageBody | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[_TokenId] | None = None

    def to_choice(self) -> ChatChoice:
        text = self.message.content if self.message else self.text
        ids = None if self.token_ids is None else tuple(self.token_ids)
        split = self.message is not None and self.message.split
        return ChatChoice(self.index, text, self.finish_reason, ids, split)


class _Response(BaseModel):
    id: str = Field(min_length=1)
    choices: list[_ChoiceBody] = Field(min_length=1)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    request: dict[str, Any]
    response: dict[str, Any]
    receipts: list[dict[str, Any]]


def conversation(
    name: str, request: Mapping[str, Any], response: Mapping[str, Any], receipts: list[Any]
) -> Conversation:
    """Raises LabError naming the field that is wrong; ``name`` stands before it."""
    try:
        parsed = _Response.model_validate(response)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, ("response", *first["loc"])))
        raise LabError(f"{name}: {where}: {first['msg']}") from error
    signed = tuple(_receipt(f"{name}: receipts.{n}", each) for n, each in enumerate(receipts))
    choices = tuple(each.to_choice() for each in parsed.choices)
    _require_once(f"{name}: response.choices: index", [str(each.index) for each in choices])
    # The evidence of an answer counts once.
    stated = [f"{each.receipt.choice} of {each.receipt.response_id}" for each in signed]
    _require_once(f"{name}: receipts: choice", stated)
    return Conversation(name, request, response, parsed.id, choices, signed)


def read(path: Path) -> Conversation:
    """The chat in a file of ``write``. Raises LabError naming the field that is wrong."""
    found = read_json(path, _File)
    return conversation(path.name, found.request, found.response, found.receipts)


def write(path: Path, chat: Conversation) -> None:
    receipts = [signed_receipt_body(each) for each in chat.receipts]
    body = {"request": dict(chat.request), "response": dict(chat.response), "receipts": receipts}
    write_json(path, body)


def _receipt(where: str, body: object) -> SignedReceipt:
    try:
        return signed_receipt(body)
    except ProtocolError as error:
        raise LabError(f"{where}: {error}") from error


def _require_once(where: str, found: list[str]) -> None:
    for each, times in Counter(found).items():
        if times > 1:
            raise LabError(f"{where} {each} is there {times} times")
