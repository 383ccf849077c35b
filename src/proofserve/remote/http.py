"""JSON over HTTP as a client asks a server for it: errors in the server's own words, and waits."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Self, TypeVar

import httpx

from proofserve.reports import NodeError, ReportedError, TooSlowError

T = TypeVar("T")

# A call that waits is answered after everything else that the server has to do.
TIMEOUT_S = 300.0
CONNECT_S = 5.0
# Bytes of vectors: more than any challenge asks for.
LONGEST_ANSWER = 64 * 2**20
# Characters of an answer that an error shows.
LONGEST_TEXT = 500
POLL_S = 0.1


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def reason_of(error: httpx.HTTPError) -> str:
    """Its text, or its name, as some errors have no text."""
    return str(error) or type(error).__name__


def refusal(response: httpx.Response) -> str:
    """The status and the beginning of the text of an answer that has been read.

    A page is no answer of a node or of vLLM: the HTML says nothing to its reader.
    """
    is_page = "html" in response.headers.get("content-type", "")
    return f"{response.status_code} {'and a web page' if is_page else response.text[:LONGEST_TEXT]}"


class JsonClient:
    """Blocking calls to the server at ``url``; ``api_key`` is the client's own.

    Raises ReportedError for a URL that is none. Calls raise NodeError with the server's own text.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.MockTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._transport = transport
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
        headers = authorization(api_key)
        try:
            self._http = httpx.Client(
                base_url=self.url, timeout=timeout, headers=headers, transport=transport
            )
            place = self._http.base_url
        except httpx.InvalidURL as error:
            raise ReportedError(f"{url}: {error}") from error
        if not (place.scheme in {"http", "https"} and place.host and (place.port or 0) < 2**16):
            raise ReportedError(f"{url!r} is no URL of a server: give one like http://HOST:8000")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """The server's answer, whatever its status. A long one, or one that drips, is an error."""
        call, patience_s = f"{method} {self.url}{path}", self._http.timeout.read or TIMEOUT_S
        try:
            with self._http.stream(method, path, json=body) as response:
                content, until = bytearray(), time.monotonic() + patience_s
                for part in response.iter_bytes():
                    content += part
                    require_short(content, call)
                    if time.monotonic() > until:
                        raise NodeError(f"{call}: its answer did not end within {patience_s:g} s")
        except httpx.HTTPError as error:
            raise NodeError(f"{call}: {reason_of(error)}") from error
        return with_content(response, content)

    def send_within(self, method: str, path: str, body: Any, seconds: float) -> httpx.Response:
        """As ``send``, of a server that may cheat.

        Raises TooSlowError unless all of the answer came in time, and NodeError if it is too long.
        """
        call = f"{method} {self.url}{path}"

        async def read() -> httpx.Response:
            # A blocking client's timeout is for each read: a slow sender could hold it for ever.
            client = httpx.AsyncClient(
                base_url=self.url,
                headers=self._http.headers,
                timeout=None,  # noqa: S113 - below
                transport=self._transport,
            )
            async with (
                asyncio.timeout(seconds),
                client,
                client.stream(method, path, json=body) as response,
            ):
                return await whole(response, call)

        try:
            return asyncio.run(read())
        except TimeoutError as error:
            raise TooSlowError(f"no answer within {seconds:g} s") from error
        except httpx.RequestError as error:
            # It also cannot be decoded, if its Content-Encoding lies.
            raise NodeError(f"{call}: {reason_of(error)}") from error

    def good(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """A successful answer."""
        return required(self.send(method, path, body), f"{method} {self.url}{path}")

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """The JSON object of a successful answer."""
        return object_of(self.good(method, path, body))


def require_short(content: bytearray, call: str) -> None:
    """Raise NodeError for an answer to ``call`` that is longer than any may be."""
    if len(content) > LONGEST_ANSWER:
        raise NodeError(f"{call}: more than {LONGEST_ANSWER} bytes")


async def whole(response: httpx.Response, call: str) -> httpx.Response:
    """The answer to ``call`` with its streamed body. Raises NodeError for one that is too long."""
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        require_short(content, call)
    return with_content(response, content)


def with_content(response: httpx.Response, content: bytearray) -> httpx.Response:
    """A streamed answer with its body, as if it had been read at once."""
    headers = [(n, v) for n, v in response.headers.items() if n != "content-encoding"]
    status, request = response.status_code, response.request
    return httpx.Response(status, headers=headers, content=bytes(content), request=request)


def required(response: httpx.Response, call: str) -> httpx.Response:
    """The answer to ``call``. Raises NodeError unless it is a successful one."""
    if response.is_error:
        raise NodeError(f"{call}: {refusal(response)}", response.status_code)
    return response


def object_of(response: httpx.Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises NodeError for another one."""
    try:
        found = response.json()
    except (ValueError, RecursionError) as error:
        raise NodeError(f"{response.url}: the answer is not JSON") from error
    if not isinstance(found, dict):
        raise NodeError(f"{response.url}: the answer is no object")
    return found


def first(ask: Callable[[], T | None], within_s: float, pause_s: float) -> T | None:
    """The first answer of ``ask`` that is not None; None if none came in time."""
    until = time.monotonic() + within_s
    while (found := ask()) is None and time.monotonic() < until:
        time.sleep(pause_s)
    return found


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> float:
    """Poll ``condition``; the seconds that took. Raises TooSlowError, which names ``what``."""
    began = time.monotonic()
    if first(lambda: condition() or None, timeout_s, POLL_S) is None:
        raise TooSlowError(f"{what}: not within {timeout_s:g} s")
    return time.monotonic() - began


def unless_exit(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A signal's SystemExit ends the program: it is no unhandled error of the task that it hits.
    if not isinstance(context.get("exception"), SystemExit):
        loop.default_exception_handler(context)
