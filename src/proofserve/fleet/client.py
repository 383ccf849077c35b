"""Calls to one member by the API of a node, bounded in time and in size; and one look at it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from proofserve.fleet.records import MemberLook, read_status
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import RoundSpec, Workload
from proofserve.wire import PROOFS
from proofserve.wire.status import DeploymentStatus

# The longest waits for a member, seconds: for its status, for a start or stop of its round,
# and for the proofs of one share of a job.
LOOK_S = 2.0
_CHANGE_S = 15.0
_JOB_S = 300.0
# Connections to one member: a look, a change of the round, a share of a job, and openings; more
# would wait.
_CONNECTIONS = 32
# The longest of a member's answers about itself, bytes.
_MOST_BYTES = 1024 * 1024
# The longest answer of a job; a vector has at most some kilobytes in base64.
_MOST_BYTES_OF_JOB = 256 * 1024 * 1024
# Characters of an answer that an error repeats.
_EXCERPT = 300
# The Date header has whole seconds, cut off: on average a member's clock is this much later.
_DATE_ROUNDING_S = 0.5


class MemberError(Exception):
    """A member did not answer, refused the call, or answered nonsense; the text does not name it.

    ``status`` is that of its answer, None without one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(MemberError):
    """There is no connection to the member, so it has not seen the call."""


class BadAnswer(MemberError):
    """The member answered something that is not of the node's API."""


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
    """The member at ``url``. Every call raises MemberError; one for its status takes ``look_s``."""

    http: aiohttp.ClientSession
    url: str
    key: str | None = field(default=None, repr=False)
    look_s: float = LOOK_S

    async def status(self) -> tuple[Mapping[str, Any], float | None]:
        """Its status, and how far its clock is ahead, in seconds."""
        return await self._call("GET", "/status", self.look_s)

    async def change(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Start, stop or configure its round by a POST to ``path``."""
        await self._call("POST", path, _CHANGE_S, body)

    async def job(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer of a POST to ``path`` that has it prove, judge or open vectors."""
        answer, _ = await self._call("POST", path, _JOB_S, body, _MOST_BYTES_OF_JOB)
        return answer

    async def self_check(self) -> float:
        """Seconds of one forward of the member."""
        answer, _ = await self._call("GET", "/health/deep", _JOB_S)
        seconds = answer.get("seconds")
        if not isinstance(seconds, int | float):
            raise BadAnswer("answered nonsense to GET /health/deep: no seconds")
        return float(seconds)

    async def _call(
        self,
        method: str,
        path: str,
        limit_s: float,
        body: Mapping[str, Any] | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> tuple[Mapping[str, Any], float | None]:
        """The JSON object that the member answers, and how far its clock is ahead, in seconds."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        url = f"{self.url}{PROOFS}{path}"
        before = time.time()
        call = self.http.request(method, url, json=body, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(limit_s), call as response:
                middle = (before + time.time()) / 2
                raw = await _bounded(response, most_bytes)
        except TimeoutError:
            raise MemberError(f"no answer within {limit_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(str(error)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise MemberError(str(error) or type(error).__name__) from error
        if not 200 <= (status := response.status) < 300:
            raise MemberError(f"{method} {path}: HTTP {status}: {_reason(raw)}", status)
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            raise BadAnswer(f"answered nonsense to {method} {path}: no JSON") from None
        if not isinstance(answer, dict):
            raise BadAnswer(f"answered nonsense to {method} {path}: no JSON object")
        return answer, _offset(response, middle)


async def _bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Raises MemberError for a body that has more than ``most_bytes``."""
    read = bytearray()
    async for chunk in response.content.iter_any():
        read += chunk
        if len(read) > most_bytes:
            raise BadAnswer(f"answered more than {most_bytes} bytes")
    return bytes(read)


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


async def look(client: MemberClient, before: MemberLook | None, now: float) -> MemberLook:
    """What the member says of itself ``now``; without an answer what it said ``before``."""
    try:
        body, clock_offset_s = await client.status()
    except BadAnswer as error:
        return MemberLook(now, answered=True, error=str(error))
    except MemberError as error:
        if advice := _advice(error):
            return MemberLook(now, answered=True, error=advice)
        return replace(before or MemberLook(now, answered=False), answered=False, error=str(error))
    return look_of(body, clock_offset_s, now)


def look_of(body: Mapping[str, Any], clock_offset_s: float | None, now: float) -> MemberLook:
    """What an answer to ``GET /status`` says."""
    if "status" in body and body.get("deployment") is None:
        lacks = "its proofserve knows no fleets (GET /status has no deployment): update it"
        return MemberLook(now, answered=True, error=lacks)
    try:
        status = read_status(body)
    except ValueError as error:
        return MemberLook(now, answered=True, error=f"answered nonsense to GET /status: {error}")
    return MemberLook(now, answered=True, clock_offset_s=clock_offset_s, status=status)


def _advice(error: MemberError) -> str | None:
    """Why the proofs of a server that answers are not for this fleet as it is, None if unknown."""
    if "PoC not enabled" in str(error):
        return "its proofs are off: start it with --enable-poc"
    if error.status in (401, 403):
        compare = "compare FLEET_MEMBER_KEY with its POC_API_KEY"
        return f"it refuses the fleet's key ({error}): {compare}"
    if error.status in (404, 405):
        return f"it has no proof endpoints ({error}): start it with --enable-poc"
    return None


# The bodies of calls, from the fleet's own records.


def round_order(
    spec: RoundSpec, lane: NonceLane, deployed: DeploymentStatus, url: str
) -> dict[str, Any]:
    """The body of ``/init/generate`` for the nonces of ``lane``, with callbacks to ``url``."""
    body = {**asdict(lane), "batch_size": spec.batch_size}
    if spec.target is not None:
        return {**body, **distance_fields(spec.work), **asdict(spec.target), "callback_url": url}
    if spec.commits_roots:
        body["commit"] = "roots"
    return {**body, **artifact_fields(spec.work, deployed), "url": url}


def work_fields(work: Workload) -> dict[str, Any]:
    block = work.block
    return {"block_hash": block.hash, "block_height": block.height, "public_key": work.public_key}


def artifact_fields(work: Workload, deployed: DeploymentStatus) -> dict[str, Any]:
    wire: Mapping[str, Any] = work.scheme.to_wire()
    body = {
        **work_fields(work),
        "scheme": wire["name"],
        "params": {"model": deployed.models[0], "seq_len": work.seq_len, "k_dim": wire["k_dim"]},
    }
    if wire.get("stronger_rng"):
        body["poc_stronger_rng"] = True
    if deployed.weights_digest is not None:
        body["weights_digest"] = deployed.weights_digest
    return body


def distance_fields(work: Workload) -> dict[str, Any]:
    wire: Mapping[str, Any] = work.scheme.to_wire()
    options = {"use_sign_flips": wire["sign_flips"], "use_layer_hooks": wire["layer_hooks"]}
    return {**work_fields(work), "seq_len": work.seq_len, **options}
