"""What a probe sends to each route, and how it reads the answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from proofserve.lab.probe.records import Alternatives, Kind, ProbePrompt, RawAnswer

PATHS: Final = {Kind.CHAT: "/chat/completions", Kind.COMPLETION: "/completions"}
# Fields that vLLM has and OpenAI has not. A model's own settings may change top-k, min-p and the
# penalty of a request that does not name them.
_MORE_FIELDS: Final = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True)
class Extras:
    """What a request asks for beside text: vLLM's own fields, and ``top`` log-probabilities."""

    more_fields: bool
    top: int


def ladder(logprobs: bool) -> tuple[Extras, ...]:
    """What to ask for, best first; an endpoint that refuses one is asked for the next."""
    tops = (20, 5, 0) if logprobs else (0,)
    return tuple(Extras(more, top) for top in tops for more in (True, False))


def body(prompt: ProbePrompt, model: str, max_tokens: int, extras: Extras) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": model,
        "temperature": 0.0 if prompt.greedy else 1.0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": max_tokens,
    }
    made |= _MORE_FIELDS if extras.more_fields else {}
    if prompt.kind is Kind.CHAT:
        made["messages"] = [{"role": "user", "content": prompt.text}]
        return made | ({"logprobs": True, "top_logprobs": extras.top} if extras.top else {})
    made["prompt"] = prompt.text
    return made | ({"logprobs": extras.top} if extras.top else {})


class _Part(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class _Usage(_Part):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _TopLog(_Part):
    token: str
    logprob: float


class _ChatToken(_TopLog):
    top_logprobs: list[_TopLog] = []


class _ChatLogs(_Part):
    content: list[_ChatToken] | None = None


class _Message(_Part):
    content: str | None = None


class _Ids(_Part):
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _ChatChoice(_Ids):
    message: _Message
    finish_reason: str | None = None
    logprobs: _ChatLogs | None = None


class _ChatBody(_Ids):
    choices: list[_ChatChoice]
    usage: _Usage | None = None


class _TextLogs(_Part):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _TextChoice(_Ids):
    text: str
    finish_reason: str | None = None
    logprobs: _TextLogs | None = None


class _TextBody(_Ids):
    choices: list[_TextChoice]
    usage: _Usage | None = None


def read_answer(prompt: ProbePrompt, content: bytes) -> RawAnswer:
    """The answer in a response's body. Raises ValueError naming the field that is wrong."""
    model = _ChatBody if prompt.kind is Kind.CHAT else _TextBody
    try:
        found = model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise ValueError(f"{where}: {first['msg']}") from error
    if len(found.choices) != 1:
        raise ValueError(f"choices: {len(found.choices)} where 1 was asked for")
    choice, usage = found.choices[0], found.usage or _Usage()
    if isinstance(choice, _ChatChoice):
        text = choice.message.content or ""
        alternatives = _of_chat((choice.logprobs or _ChatLogs()).content or ())
    else:
        text, alternatives = choice.text, _of_text(choice.logprobs or _TextLogs())
    # vLLM has the prompt's ids beside the choices of a chat, and within those of a completion.
    prompt_ids = found.prompt_token_ids or choice.prompt_token_ids
    return RawAnswer(
        prompt,
        text,
        choice.finish_reason or "",
        usage.prompt_tokens,
        usage.completion_tokens,
        None if prompt_ids is None else tuple(prompt_ids),
        None if choice.token_ids is None else tuple(choice.token_ids),
        alternatives,
    )


def _of_chat(tokens: Sequence[_ChatToken]) -> tuple[Alternatives, ...]:
    return tuple(
        Alternatives(
            each.token,
            (*((top.token, top.logprob) for top in each.top_logprobs), (each.token, each.logprob)),
        )
        for each in tokens
    )


def _of_text(logs: _TextLogs) -> tuple[Alternatives, ...]:
    tops = logs.top_logprobs or [None] * len(logs.tokens)
    if not len(tops) == len(logs.token_logprobs) == len(logs.tokens):
        raise ValueError("logprobs: its lists differ in length")
    made = []
    for token, log, top in zip(logs.tokens, logs.token_logprobs, tops, strict=True):
        chosen = () if log is None else ((token, log),)
        made.append(Alternatives(token, (*(top or {}).items(), *chosen)))
    return tuple(made)
