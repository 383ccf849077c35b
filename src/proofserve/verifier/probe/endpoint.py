"""An OpenAI-compatible endpoint: prompts and its answers, and waiting when it says so."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final

import httpx
from pydantic import AliasPath, BaseModel, Field, FiniteFloat, ValidationError

from proofserve.remote.http import TIMEOUT_S, authorization, reason_of, refusal, unless_exit, whole
from proofserve.reports import NodeError, Progress, ReportedError
from proofserve.wire.records import first_problem

# Fields that vLLM has and OpenAI has not. A model's own settings may change top-k, min-p and the
# penalty of a request that does not name them.
_MORE_FIELDS: Final = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
# Seconds of one wait, and of all waits of a probe.
LONGEST_WAIT_S: Final = 120.0
ALL_WAITS_S: Final = 900.0
_FIRST_WAIT_S: Final = 1.0
# Attempts at a request that is answered by 429 or 503, and at one that fails.
BUSY_ATTEMPTS: Final = 6
ATTEMPTS: Final = 3
_BUSY: Final = frozenset({429, 503})
_FAILURES: Final = frozenset({500, 502, 504})
# Statuses with which endpoints refuse a field that they do not have.
_REFUSALS: Final = frozenset({400, 404, 405, 422, 501})


class Kind(StrEnum):
    """The two routes that a probe asks."""

    CHAT = "chat"
    COMPLETION = "completion"


PATHS: Final = {Kind.CHAT: "/chat/completions", Kind.COMPLETION: "/completions"}


@dataclass(frozen=True, slots=True)
class ProbePrompt:
    """``greedy`` asks for a temperature of 0, else 1 without top-k and top-p."""

    number: int
    kind: Kind
    text: str
    greedy: bool

    @property
    def request(self) -> Mapping[str, Any]:
        """The field of a request that has the text."""
        if self.kind is Kind.CHAT:
            return {"messages": [{"role": "user", "content": self.text}]}
        return {"prompt": self.text}


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The chosen token, and tokens with their log-probabilities, the chosen one among them."""

    token: str
    logs: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """An answer as the endpoint gave it; None is what it did not say.

    ``alternatives`` has one entry for each token, none without log-probabilities.
    """

    prompt: ProbePrompt
    text: str
    finish_reason: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    alternatives: tuple[Alternatives, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the model ended it, by a token of which endpoints show the text nowhere."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A prompt without an answer that can be judged; ``unsure`` if its token ids are not told."""

    prompt: ProbePrompt
    reason: str
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class Extras:
    """What a request asks for beside text: vLLM's own fields, and ``top`` log-probabilities."""

    more_fields: bool
    top: int


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
    made |= prompt.request
    if extras.top and prompt.kind is Kind.CHAT:
        made |= {"logprobs": True, "top_logprobs": extras.top}
    elif extras.top:
        made["logprobs"] = extras.top
    return made


class _Token(BaseModel):
    token: str
    logprob: FiniteFloat
    top_logprobs: list["_Token"] = []


class _Logs(BaseModel):
    """``content`` is that of a chat, the others are those of a completion."""

    content: list[_Token] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[FiniteFloat | None] | None = None
    top_logprobs: list[dict[str, FiniteFloat] | None] | None = None

    def of_chat(self) -> Iterator[Alternatives]:
        for each in self.content or ():
            every = (*each.top_logprobs, each)
            yield Alternatives(each.token, tuple((of.token, of.logprob) for of in every))

    def of_completion(self) -> Iterator[Alternatives]:
        """Raises ValueError for lists that differ in length."""
        tokens, chosen = self.tokens or [], self.token_logprobs or []
        tops = self.top_logprobs or [None] * len(tokens)
        if not len(tops) == len(chosen) == len(tokens):
            raise ValueError("logprobs: its lists differ in length")
        for token, log, top in zip(tokens, chosen, tops, strict=True):
            own = () if log is None else ((token, log),)
            yield Alternatives(token, (*(top or {}).items(), *own))


class _Message(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    """That of a chat has a ``message``, that of a completion a ``text``."""

    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logs | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None


class _Answer(BaseModel):
    """Only what a probe reads is named."""

    choices: list[_Choice]
    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))
    completion_tokens: int | None = Field(
        None, validation_alias=AliasPath("usage", "completion_tokens")
    )
    prompt_token_ids: tuple[int, ...] | None = None


def read_answer(prompt: ProbePrompt, content: bytes) -> RawAnswer:
    """The answer in a response's body. Raises ValueError naming the field that is wrong."""
    try:
        found = _Answer.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(": ".join(first_problem(error, "the body"))) from error
    if len(found.choices) != 1:
        raise ValueError(f"choices: {len(found.choices)} where 1 was asked for")
    choice = found.choices[0]
    logs = choice.logprobs or _Logs()
    if prompt.kind is Kind.CHAT:
        if choice.message is None:
            raise ValueError("choices.0.message: Field required")
        text, alternatives = choice.message.content or "", logs.of_chat()
    else:
        if choice.text is None:
            raise ValueError("choices.0.text: Field required")
        text, alternatives = choice.text, logs.of_completion()
    return RawAnswer(
        prompt,
        text,
        choice.finish_reason or "",
        found.prompt_tokens,
        found.completion_tokens,
        # vLLM has the prompt's ids beside the choices of a chat, within those of a completion.
        found.prompt_token_ids or choice.prompt_token_ids,
        choice.token_ids,
        tuple(alternatives),
    )


class RateLimit:
    """One request that was told to wait makes all others wait too.

    ``told`` is called with the seconds of each wait. ``waited_s`` is how long requests were held.
    """

    def __init__(self, told: Callable[[float], None]) -> None:
        self._told = told
        self._until = 0.0
        self.waited_s = 0.0

    async def passed(self) -> None:
        """Return when no wait is left; another request may have made it longer meanwhile."""
        while (left := self._until - time.monotonic()) > 0.0:  # noqa: ASYNC110 - a clock, no event
            await asyncio.sleep(left)

    def hold(self, retry_after: str | None, attempt: int, url: str) -> None:
        """Wait as the header says; without one, twice as long at each ``attempt`` from 0 on.

        Raises NodeError if that is longer than a probe waits.
        """
        seconds = _seconds(retry_after, _FIRST_WAIT_S * 2**attempt)
        until = time.monotonic() + seconds
        more = max(0.0, until - max(self._until, time.monotonic()))
        if seconds > LONGEST_WAIT_S or self.waited_s + more > ALL_WAITS_S:
            raise NodeError(
                f"{url} asks to wait {seconds:.0f} s; a probe waits at most {LONGEST_WAIT_S:.0f} s"
                f" at a time and {ALL_WAITS_S:.0f} s in all. Try later, or with --concurrency 1"
            )
        self.waited_s += more
        self._until = max(self._until, until)
        if more:
            self._told(seconds)


def _seconds(retry_after: str | None, otherwise: float) -> float:
    """The header's seconds, or those until its date; ``otherwise`` if it says neither."""
    with suppress(ValueError, TypeError):
        return max(0.0, float(retry_after or ""))
    with suppress(ValueError, TypeError):
        date = parsedate_to_datetime(retry_after or "")
        return max(0.0, (date - datetime.now(UTC)).total_seconds())
    return otherwise


@dataclass
class Endpoint:
    """Blocking calls. They raise NodeError for what ends a probe: no answer at all, or no key.

    ``url`` is with or without /v1. ``refused`` says why a route is not asked any more, ``settled``
    what each route gives.
    """

    url: str
    api_key: str | None = field(repr=False)
    max_tokens: int
    concurrency: int
    logprobs: bool
    progress: Progress
    settled: dict[Kind, Extras] = field(default_factory=dict)
    refused: dict[Kind, str] = field(default_factory=dict)
    model: str = ""

    def __post_init__(self) -> None:
        self._base = self.url.rstrip("/").removesuffix("/v1") + "/v1"
        self.limit = RateLimit(
            lambda seconds: self.progress.step(f"waiting {seconds:.0f} s, as the endpoint asks")
        )

    def choose_model(self, wanted: str | None) -> str:
        """``wanted``, or the first that is listed. Raises ReportedError if it is not there."""
        listed = asyncio.run(self._listed())
        if not listed and wanted is None:
            raise ReportedError(f"{self._base}/models lists no models; give --served-model")
        if wanted is not None and listed and wanted not in listed:
            raise ReportedError(f"--served-model {wanted}: the endpoint has {', '.join(listed)}")
        self.model = wanted or (listed or [""])[0]
        return self.model

    def ask(self, prompts: Sequence[ProbePrompt]) -> list[RawAnswer | LeftOut]:
        """An answer to each, or why there is none, in the order of ``prompts``."""
        return asyncio.run(self._ask(prompts))

    async def _listed(self) -> list[str]:
        """Empty if the endpoint does not say."""
        async with self._http() as http:
            response = await self._sent(http, "GET", "/models")
        try:
            listed = [] if response.is_error else response.json()["data"]
            return [str(each["id"]) for each in listed]
        except (ValueError, KeyError, TypeError, RecursionError):
            return []

    async def _ask(self, prompts: Sequence[ProbePrompt]) -> list[RawAnswer | LeftOut]:
        asyncio.get_running_loop().set_exception_handler(unless_exit)
        places = asyncio.Semaphore(self.concurrency)
        found: dict[int, RawAnswer | LeftOut] = {}
        async with self._http() as http:
            # The first prompt of a route finds out what the route gives.
            for prompt in prompts:
                if prompt.kind not in self.settled and prompt.kind not in self.refused:
                    found[prompt.number] = await self._settle(http, prompt)

            async def one(prompt: ProbePrompt) -> None:
                if prompt.kind in self.refused:
                    found[prompt.number] = LeftOut(prompt, self.refused[prompt.kind])
                    return
                async with places:
                    response = await self._asked(http, prompt, self.settled[prompt.kind])
                self.progress.advance()
                found[prompt.number] = _answer(prompt, response)

            await asyncio.gather(*(one(each) for each in prompts if each.number not in found))
        return [found[prompt.number] for prompt in prompts]

    async def _settle(self, http: httpx.AsyncClient, prompt: ProbePrompt) -> RawAnswer | LeftOut:
        kind, refused = prompt.kind, ""
        # The best first; an endpoint that refuses one is asked for the next.
        tops = (20, 5, 0) if self.logprobs else (0,)
        for extras in (Extras(more, top) for top in tops for more in (True, False)):
            response = await self._asked(http, prompt, extras)
            if response.is_success:
                self.settled[kind] = extras
                self.progress.advance()
                return _answer(prompt, response)
            refused = refusal(response)
            if response.status_code not in _REFUSALS:
                raise NodeError(f"{self._base}{PATHS[kind]}: {refused}")
        self.refused[kind] = f"the endpoint refuses {PATHS[kind]}: {refused}"
        return LeftOut(prompt, self.refused[kind])

    async def _asked(
        self, http: httpx.AsyncClient, prompt: ProbePrompt, extras: Extras
    ) -> httpx.Response:
        made = body(prompt, self.model, self.max_tokens, extras)
        return await self._sent(http, "POST", PATHS[prompt.kind], made)

    async def _sent(
        self, http: httpx.AsyncClient, method: str, path: str, content: Any = None
    ) -> httpx.Response:
        attempt = 0
        while True:
            await self.limit.passed()
            last, wanted = attempt >= ATTEMPTS - 1, None
            try:
                async with (
                    asyncio.timeout(TIMEOUT_S),
                    http.stream(method, self._base + path, json=content) as streamed,
                ):
                    response = await whole(streamed, f"{method} {self._base}{path}")
            except (httpx.RequestError, TimeoutError) as error:
                if last:
                    late = f"its answer did not end within {TIMEOUT_S:g} s"
                    why = late if isinstance(error, TimeoutError) else reason_of(error)
                    raise NodeError(f"{method} {self._base}{path}: {why}") from error
            else:
                status, wanted = response.status_code, response.headers.get("retry-after")
                if status in {401, 403}:
                    hint = "" if self.api_key else "; give --api-key"
                    raise NodeError(f"{self._base}{path}: {refusal(response)}{hint}")
                last = attempt >= BUSY_ATTEMPTS - 1 if status in _BUSY else last
                if last or status not in _BUSY | _FAILURES:
                    return response
            self.limit.hold(wanted, attempt, self._base)
            attempt += 1

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=TIMEOUT_S, headers=authorization(self.api_key))


def _answer(prompt: ProbePrompt, response: httpx.Response) -> RawAnswer | LeftOut:
    if not response.is_success:
        return LeftOut(prompt, f"the endpoint answered {refusal(response)}")
    try:
        return read_answer(prompt, response.content)
    except ValueError as error:
        return LeftOut(prompt, f"the answer cannot be read: {error}")
