"""An OpenAI-compatible endpoint: its models, and answers to prompts."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from proofserve.lab.client.errors import LabError, NodeError
from proofserve.lab.client.load import unless_exit
from proofserve.lab.client.progress import Progress
from proofserve.lab.probe.bodies import PATHS, Extras, body, ladder, read_answer
from proofserve.lab.probe.rate_limit import RateLimit
from proofserve.lab.probe.records import Kind, LeftOut, ProbePrompt, RawAnswer

TIMEOUT_S: Final = 300.0
# Attempts at a request that is answered by 429 or 503, and at one that fails.
BUSY_ATTEMPTS: Final = 6
ATTEMPTS: Final = 3
LONGEST_TEXT: Final = 300
_BUSY: Final = frozenset({429, 503})
_FAILURES: Final = frozenset({500, 502, 504})
_KEYS: Final = frozenset({401, 403})
# Statuses with which endpoints refuse a field that they do not have.
_REFUSALS: Final = frozenset({400, 404, 405, 422, 501})


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """``url`` with or without /v1; ``model`` None for the first that the endpoint lists."""

    url: str
    model: str | None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 64
    concurrency: int = 4
    logprobs: bool = True


class Endpoint:
    """Blocking calls. They raise NodeError for what ends a probe: no answer at all, or no key.

    ``refused`` says why a route is not asked any more, ``settled`` what each route gives.
    """

    def __init__(self, options: EndpointOptions, progress: Progress) -> None:
        self._options = options
        self._progress = progress
        self._base = options.url.rstrip("/").removesuffix("/v1") + "/v1"
        self.limit = RateLimit(
            lambda seconds: progress.step(f"waiting {seconds:.0f} s, as the endpoint asks")
        )
        self.settled: dict[Kind, Extras] = {}
        self.refused: dict[Kind, str] = {}
        self.model = ""

    def choose_model(self) -> str:
        """The name to ask for. Raises LabError if the endpoint does not have it."""
        wanted = self._options.model
        listed = asyncio.run(self._listed())
        if listed is None and wanted is None:
            raise LabError(f"{self._base}/models lists no models; give --served-model")
        if wanted is not None and listed is not None and wanted not in listed:
            raise LabError(f"--served-model {wanted}: the endpoint has {', '.join(listed)}")
        self.model = wanted or (listed or [""])[0]
        return self.model

    def ask(self, prompts: Sequence[ProbePrompt]) -> list[RawAnswer | LeftOut]:
        """An answer to each, or why there is none, in the order of ``prompts``."""
        return asyncio.run(self._ask(prompts))

    async def _listed(self) -> list[str] | None:
        async with self._http() as http:
            response = await self._sent(http, "GET", "/models")
        if response.is_error:
            return None
        try:
            return [str(each["id"]) for each in response.json()["data"]] or None
        except (ValueError, KeyError, TypeError):
            return None

    async def _ask(self, prompts: Sequence[ProbePrompt]) -> list[RawAnswer | LeftOut]:
        asyncio.get_running_loop().set_exception_handler(unless_exit)
        places = asyncio.Semaphore(self._options.concurrency)
        found: dict[int, RawAnswer | LeftOut] = {}
        async with self._http() as http:
            # The first prompt of a route finds out what the route gives.
            for prompt in _first_of_each(p for p in prompts if p.kind not in self.settled):
                found[prompt.number] = await self._settle(http, prompt)

            async def one(prompt: ProbePrompt) -> None:
                async with places:
                    found[prompt.number] = await self._one(http, prompt)

            await asyncio.gather(*(one(each) for each in prompts if each.number not in found))
        return [found[prompt.number] for prompt in prompts]

    async def _settle(self, http: httpx.AsyncClient, prompt: ProbePrompt) -> RawAnswer | LeftOut:
        kind = prompt.kind
        if kind in self.refused:
            return LeftOut(prompt, self.refused[kind])
        response = None
        for extras in ladder(self._options.logprobs):
            response = await self._asked(http, prompt, extras)
            if response.is_success:
                self.settled[kind] = extras
                self._progress.advance()
                return _answer(prompt, response)
            if response.status_code not in _REFUSALS:
                raise NodeError(f"{self._base}{PATHS[kind]}: {_shown(response)}")
        if response is None:
            raise AssertionError("a ladder has a step")
        self.refused[kind] = f"the endpoint refuses {PATHS[kind]}: {_shown(response)}"
        return LeftOut(prompt, self.refused[kind])

    async def _one(self, http: httpx.AsyncClient, prompt: ProbePrompt) -> RawAnswer | LeftOut:
        if prompt.kind in self.refused:
            return LeftOut(prompt, self.refused[prompt.kind])
        response = await self._asked(http, prompt, self.settled[prompt.kind])
        self._progress.advance()
        return _answer(prompt, response)

    async def _asked(
        self, http: httpx.AsyncClient, prompt: ProbePrompt, extras: Extras
    ) -> httpx.Response:
        made = body(prompt, self.model, self._options.max_tokens, extras)
        return await self._sent(http, "POST", PATHS[prompt.kind], made)

    async def _sent(
        self, http: httpx.AsyncClient, method: str, path: str, content: Any = None
    ) -> httpx.Response:
        for attempt in itertools.count():
            await self.limit.passed()
            last, wanted = attempt >= ATTEMPTS - 1, None
            try:
                response = await http.request(method, self._base + path, json=content)
            except httpx.TransportError as error:
                if last:
                    reason = str(error) or type(error).__name__
                    raise NodeError(f"{method} {self._base}{path}: {reason}") from error
            else:
                status, wanted = response.status_code, response.headers.get("retry-after")
                if status in _KEYS:
                    hint = "" if self._options.api_key else "; give --api-key"
                    raise NodeError(f"{self._base}{path}: {_shown(response)}{hint}")
                last = attempt >= BUSY_ATTEMPTS - 1 if status in _BUSY else last
                if last or status not in _BUSY | _FAILURES:
                    return response
            self.limit.hold(wanted, attempt, self._base)
        raise AssertionError("the loop ends by an answer or an error")

    def _http(self) -> httpx.AsyncClient:
        key = self._options.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(timeout=TIMEOUT_S, headers=headers)


def _first_of_each(prompts: Iterable[ProbePrompt]) -> Iterable[ProbePrompt]:
    first: dict[Kind, ProbePrompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.kind, prompt)
    return first.values()


def _answer(prompt: ProbePrompt, response: httpx.Response) -> RawAnswer | LeftOut:
    if not response.is_success:
        return LeftOut(prompt, f"the endpoint answered {_shown(response)}")
    try:
        return read_answer(prompt, response.content)
    except ValueError as error:
        return LeftOut(prompt, f"the answer cannot be read: {error}")


def _shown(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:LONGEST_TEXT]}"
