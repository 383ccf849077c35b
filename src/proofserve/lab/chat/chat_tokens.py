"""The tokens of a chat: those that the client asked and read, against those of a receipt."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from proofserve.lab.chat.conversation import ChatChoice
from proofserve.lab.client.errors import LabError
from proofserve.protocol.receipts.record import Receipt, token_hash

# Fields by which a prompt has other tokens, in ways that depend on the server.
PROMPT_SHAPING = frozenset(
    {"tools", "documents", "reasoning_effort", "truncate_prompt_tokens", "add_special_tokens"}
)
PLAIN_MESSAGE = frozenset({"role", "content", "name"})
# Fields by which a server shows another text than that of the answer's tokens.
TEXT_SHAPING = frozenset(
    {"echo", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "tools"}
)
UNFINISHED = "\ufffd"


class ChatTokenizer(Protocol):
    """The checkpoint's tokenizer and chat template.

    ``tells_time`` says that the template writes the date into prompts.
    """

    @property
    def tells_time(self) -> bool: ...

    def prompt_ids(self, request: Mapping[str, Any]) -> tuple[int, ...]:
        """The ids of a request's prompt. Raises LabError if its fields make none."""

    def answer_ids(self, text: str) -> tuple[int, ...]: ...

    def text(self, ids: tuple[int, ...]) -> str:
        """The text of an answer's ids, without special tokens."""

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end an answer and do not show in its text."""


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A check that failed; ``text`` says what does not fit, for a reader."""

    check: str
    text: str


class StatementError(Exception):
    """A statement of a receipt does not hold."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.failure = FailedCheck(check, text)


def prompt_ids(
    name: str, request: Mapping[str, Any], receipt: Receipt, tokenizer: ChatTokenizer
) -> tuple[int, ...]:
    """The ids of the request's prompt, which the node read.

    Raises StatementError if it read others, and LabError if servers may honestly read others.
    """
    ids = tokenizer.prompt_ids(request)
    if len(ids) == receipt.prompt_tokens and _hash(ids, "prompt") == receipt.prompt_sha256:
        return ids
    read = f"the node read {receipt.prompt_tokens} tokens"
    text = f"{read}, which are not the {len(ids)} of this request by the checkpoint's template"
    if _is_plain(request) and not tokenizer.tells_time:
        raise StatementError("prompt", text)
    raise LabError(f"{name}: prompt: {text}; servers may read such a request in several ways")


def _is_plain(request: Mapping[str, Any]) -> bool:
    """Whether every server makes the same prompt of ``request``."""
    messages = request.get("messages") or ()
    return not _has_any(request, PROMPT_SHAPING) and all(
        isinstance(each, Mapping)
        and PLAIN_MESSAGE.issuperset(each)
        and isinstance(each.get("content"), str)
        for each in messages
    )


def output_ids(
    name: str,
    request: Mapping[str, Any],
    choice: ChatChoice,
    receipt: Receipt,
    tokenizer: ChatTokenizer,
) -> tuple[int, ...]:
    """The ids of the answer that the client saw, which the receipt is of.

    Raises StatementError if it is of another one, and LabError if the ids are not certain.
    """
    if choice.token_ids is None:
        return _spelt(name, choice.text or "", receipt, tokenizer)
    ids = _stated(choice.token_ids, receipt)
    _shows(name, request, choice, ids, tokenizer)
    return ids


def _stated(ids: tuple[int, ...], receipt: Receipt) -> tuple[int, ...]:
    if len(ids) != receipt.output_tokens:
        text = f"the receipt has {receipt.output_tokens} tokens, the answer {len(ids)}"
        raise StatementError("answer", text)
    if token_hash(ids) != receipt.output_sha256:
        raise StatementError("answer", "the receipt is of other tokens")
    return ids


def _shows(
    name: str,
    request: Mapping[str, Any],
    choice: ChatChoice,
    ids: tuple[int, ...],
    tokenizer: ChatTokenizer,
) -> None:
    """The client read the text of its tokens. What a server may honestly change is no failure."""
    if choice.text is None:
        return
    shown, whole = _trimmed(choice.text), _trimmed(tokenizer.text(ids))
    # The token that ends an answer does not show.
    if shown in {whole, _trimmed(tokenizer.text(ids[:-1]))}:
        return
    begins = bool(shown) and whole.startswith(shown)
    if begins and request.get("stop"):
        return
    certain = not (choice.split or _has_any(request, TEXT_SHAPING) or UNFINISHED in whole)
    if certain and begins:
        raise StatementError("answer", "the text of the answer is cut: its tokens say more")
    if certain and shown not in whole:
        raise StatementError("answer", "the text of the answer is not that of its tokens")
    raise LabError(f"{name}: the answer's text is not the whole text of its tokens")


def _trimmed(text: str) -> str:
    """Servers and tokenizers differ in spaces at both ends, and in an unfinished last character."""
    return text.rstrip(UNFINISHED).strip()


def _spelt(name: str, text: str, receipt: Receipt, tokenizer: ChatTokenizer) -> tuple[int, ...]:
    """The ids of an answer that the client has as text alone."""
    for ids in _candidates(text, receipt.output_tokens, tokenizer):
        if token_hash(ids) == receipt.output_sha256:
            return ids
    # The same text has several spellings in tokens, shorter ones too, so this proves nothing.
    hint = 'ask with "return_token_ids": true'
    raise LabError(f"{name}: the answer's token ids cannot be told from its text; {hint}")


def _candidates(text: str, tokens: int, tokenizer: ChatTokenizer) -> Iterator[tuple[int, ...]]:
    ids = tokenizer.answer_ids(text)
    if len(ids) == tokens:
        yield ids
    elif len(ids) == tokens - 1:
        yield from ((*ids, end) for end in tokenizer.end_ids)


def _has_any(request: Mapping[str, Any], fields: frozenset[str]) -> bool:
    return any(request.get(field) not in (None, [], {}) for field in fields)


def _hash(ids: tuple[int, ...], field: str) -> str:
    try:
        return token_hash(ids)
    except OverflowError as error:
        raise LabError(f"request.{field}: its token ids are not 0..2**32-1") from error
