"""Calls to one member by the API of a node: bounded in time and in size."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from proofserve.wire.paths import PROOFS

# Connections to one member: a look, a change of the round, a share of a job, and openings; more
# would wait.
_CONNECTIONS = 32
# The longest of a member's answers about itself, bytes.
_MOST_BYTES = 1024 * 1024
# The longest answer of a job; a vector has at most some kilobytes in base64.
_MOST_BYTES_OF_JOB = 256 * 1024 * 1024
_SUCCESS = range(200, 300)
# Characters of an answer that an error repeats.
_EXCERPT = 300
# The Date header has whole seconds, cut off: on average a member's clock is this much later.
_DATE_ROUNDING_S = 0.5


class MemberError(Exception):
    """A member did not answer, refused the call, or answered nonsense.

    The text says which, and does not name the member. ``status`` is that of its answer, None
    without one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(MemberError):
    """There is no connection to the member, so it has not seen the call."""


class NonsenseAnswered(MemberError):
    """The member answered something that is not of the node's API."""


@dataclass(frozen=True, slots=True)
class MemberAnswered:
    """The JSON object that a member answered, and how far its clock is ahead, in seconds."""

    body: Mapping[str, Any]
    clock_offset_s: float | None


@dataclass(frozen=True, slots=True)
class CallTimes:
    """How long calls to a member may take, in seconds.

    ``look_s`` for its status, ``change_s`` for a start or stop of its round, ``job_s`` for the
    proofs of one share of a job.
    """

    look_s: float = 2.0
    change_s: float = 15.0
    job_s: float = 300.0


@asynccontextmanager
async def member_http() -> AsyncIterator[aiohttp.ClientSession]:
    """A client for all members, with a pool of connections for each. It uses no proxy."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=_CONNECTIONS)
    async with aiohttp.ClientSession(
        connector=connector,
        # Each call has a limit of its own.
        timeout=aiohttp.ClientTimeout(),
        cookie_jar=aiohttp.DummyCookieJar(),
        # A compressed answer would get around the limits of size.
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
    ) as http:
        yield http


@dataclass(frozen=True, slots=True)
class MemberClient:
    """The member at ``url``. Every call raises MemberError. ``clock`` gives wall-clock seconds."""

    http: aiohttp.ClientSession
    url: str
    key: str | None = field(default=None, repr=False)
    times: CallTimes = CallTimes()
    clock: Callable[[], float] = time.time

    async def status(self) -> MemberAnswered:
        return await self._call("GET", "/status", self.times.look_s)

    async def start(self, body: Mapping[str, Any]) -> None:
        await self._call("POST", "/init/generate", self.times.change_s, body)

    async def go_on(self) -> None:
        """Continue the configured round of the distance protocol."""
        await self._call("POST", "/phase/generate", self.times.change_s)

    async def stop(self) -> None:
        await self._call("POST", "/stop", self.times.change_s)

    async def configure(self, body: Mapping[str, Any]) -> None:
        """Configure a round of the distance protocol without starting it."""
        await self._call("POST", "/init", self.times.change_s, body)

    async def prove(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._job("/generate", body)

    async def judge(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._job("/validate", body)

    async def open_vectors(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._job("/open", body)

    async def self_check(self) -> float:
        """Seconds of one forward of the member."""
        answer = await self._call("GET", "/health/deep", self.times.job_s)
        seconds = answer.body.get("seconds")
        if not isinstance(seconds, int | float):
            raise NonsenseAnswered("answered nonsense to GET /health/deep: no seconds")
        return float(seconds)

    async def _job(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        answer = await self._call("POST", path, self.times.job_s, body, _MOST_BYTES_OF_JOB)
        return answer.body

    async def _call(
        self,
        method: str,
        path: str,
        limit_s: float,
        body: Mapping[str, Any] | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> MemberAnswered:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = f"{self.url}{PROOFS}{path}"
        before = self.clock()
        try:
            async with (
                asyncio.timeout(limit_s),
                self.http.request(
                    method, url, json=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                middle = (before + self.clock()) / 2
                raw = await _bounded(response, most_bytes)
        except TimeoutError:
            raise MemberError(f"no answer within {limit_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise MemberError(str(error) or type(error).__name__) from error
        if (status := response.status) not in _SUCCESS:
            raise MemberError(f"{method} {path}: HTTP {status}: {_reason(raw)}", status)
        return MemberAnswered(_object(raw, f"{method} {path}"), _offset(response, middle))


async def _bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Raises MemberError for a body that has more than ``most_bytes``."""
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > most_bytes:
            raise NonsenseAnswered(f"answered more than {most_bytes} bytes")
    return bytes(read)


def _object(raw: bytes, call: str) -> Mapping[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise NonsenseAnswered(f"answered nonsense to {call}: no JSON") from None
    if not isinstance(body, dict):
        raise NonsenseAnswered(f"answered nonsense to {call}: no JSON object")
    return body


def _reason(raw: bytes) -> str:
    """The ``detail`` of an error, or the beginning of a body in another form."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[:_EXCERPT].decode(errors="replace").strip()
    detail = body.get("detail", body) if isinstance(body, dict) else body
    if isinstance(detail, list):
        detail = "; ".join(map(_problem, detail))
    return (detail if isinstance(detail, str) else json.dumps(detail))[:_EXCERPT]


def _problem(problem: Any) -> str:
    if not isinstance(problem, dict) or not isinstance(problem.get("loc"), list):
        return str(problem)
    return f"{'.'.join(str(part) for part in problem['loc'][1:])}: {problem.get('msg')}"


def _offset(response: aiohttp.ClientResponse, middle: float) -> float | None:
    try:
        at = parsedate_to_datetime(response.headers.get("date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return at + _DATE_ROUNDING_S - middle
