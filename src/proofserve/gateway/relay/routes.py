"""The paths of vLLM's server whose POST requests are relayed, and how one differs from another."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from proofserve.gateway.failures import ErrorShape


class Usage(enum.Enum):
    """Where an answer says how many tokens it cost."""

    LAST = enum.auto()
    FIRST = enum.auto()  # before results of any length
    NONE = enum.auto()  # it costs none, or does not say


@dataclass(frozen=True, slots=True)
class Route:
    """One path. A request has at least one of the fields ``prompts``; its body may be a ``form``.

    ``answer_id`` is what vLLM puts before a request's id to make that of the answer; empty if an
    answer has no receipt.
    """

    prompts: tuple[str, ...] = ()
    example: Any = "Hello"
    usage: Usage = Usage.LAST
    errors: ErrorShape = ErrorShape.OPENAI
    answer_id: bytes = b""
    form: bool = False


MESSAGES = [{"role": "user", "content": "Hello"}]
# Counting tokens and cutting text into them takes time of the server that streams chat, and no
# engine: such requests take permits, for milliseconds, and cost no tokens.
ROUTES: Mapping[bytes, Route] = {
    b"/v1/chat/completions": Route(("messages",), MESSAGES, answer_id=b"chatcmpl-"),
    b"/v1/completions": Route(("prompt", "prompt_embeds"), answer_id=b"cmpl-"),
    b"/v1/embeddings": Route(("input", "messages")),
    b"/v1/responses": Route(("input",)),
    b"/v1/messages": Route(
        ("messages",), MESSAGES, errors=ErrorShape.ANTHROPIC, answer_id=b"chatcmpl-"
    ),
    b"/v1/messages/count_tokens": Route(("messages",), MESSAGES, Usage.NONE, ErrorShape.ANTHROPIC),
    b"/v1/rerank": Route(("documents",), ["Hello"], Usage.FIRST),
    b"/v1/score": Route(("text_1", "queries", "data_1")),
    b"/v1/audio/transcriptions": Route(("file",), form=True),
    b"/tokenize": Route(("prompt", "messages"), usage=Usage.NONE),
    b"/detokenize": Route(("tokens",), [1], Usage.NONE),
}
# Any other path that the operator names.
OTHER = Route(usage=Usage.NONE, form=True)


class RelayTarget(NamedTuple):
    """Where a request goes: path and query as the client sent them, and the path's route."""

    url: bytes
    route: Route
