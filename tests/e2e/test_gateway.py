"""The gateway on a real engine: vLLM in a process of its own, and vLLM in the gateway's.

Every test runs in both modes, on one server each. The last one ends it.
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer

from support.gateway import (
    CONNECTIONS,
    ENDED,
    ENDLESS,
    GRANTED,
    IN_FLIGHT,
    RUNNING,
    WAITING,
    Heartbeat,
    Reply,
    ServedGateway,
    Users,
    ask_alone,
    burst,
    embedded,
    in_front_of,
    two_processes,
    until,
)
from support.gateway_requests import CHAT, IN_SCHEMA, NAMED, REQUESTS, WEATHER, chat
from support.node import NAME, ROUND
from support.pace import PACE

pytestmark = [pytest.mark.engine, pytest.mark.anyio]

PERMITS = 100


@pytest.fixture(scope="module", params=[two_processes, embedded], ids=lambda mode: mode.__name__)
def served(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedGateway]:
    with request.param(tiny, tmp_path_factory.mktemp("gateway")) as running:
        yield running


# Of what vLLM says, and of one more gateway, which is a process of its own in either mode.
IN_ONE_MODE = pytest.mark.parametrize("served", [two_processes], ids=[""], indirect=True)


@pytest.fixture
def client(served: ServedGateway) -> Iterator[openai.OpenAI]:
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60.0) as made:
        yield made


@pytest.fixture(scope="module")
def blanks(tiny: Path) -> dict[str, int]:
    """Forbids blanks: in the arguments of a tool the model would write nothing else."""
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    texts = {i: tokenizer.decode([i]) for i in range(5, tokenizer.get_vocab_size())}
    return {str(i): -100 for i, text in texts.items() if not text.strip()}


# -- the official client ---------------------------------------------------------------------


def test_a_stream_says_what_the_plain_answer_says(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": chat(1)["messages"], "max_tokens": 200, "seed": 7}
    plain = client.chat.completions.create(**asked, temperature=0)
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 200
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = client.chat.completions.create(**asked, temperature=0)
    chunks: list[ChatCompletionChunk] = list(stream)
    assert chunks[-1].usage == plain.usage
    said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(said) == plain.choices[0].message.content
    # How many tokens vLLM puts into one piece is chance.
    assert sum(map(bool, said)) > 1


def test_completions_and_models_are_served(client: openai.OpenAI) -> None:
    done = client.completions.create(model=NAME, prompt="Rivers are", max_tokens=8, temperature=0)
    assert done.choices[0].text
    assert [model.id for model in client.models.list()] == [NAME]


@IN_ONE_MODE
def test_a_tool_is_called_when_it_is_named_and_not_when_it_is_not_wanted(
    client: openai.OpenAI, blanks: dict[str, int]
) -> None:
    asked: Any = {
        **{"model": NAME, "messages": chat(1)["messages"], "tools": [WEATHER]},
        **{"max_tokens": 60, "temperature": 0, "logit_bias": blanks},
    }
    called = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0]
    (call,) = called.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Rome", "Oslo"}
    streamed = ""
    for chunk in client.chat.completions.create(**asked, tool_choice=NAMED, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            streamed += (part.function and part.function.arguments) or ""
    assert json.loads(streamed) == json.loads(call.function.arguments)
    for choice in ("none", "auto"):
        said = client.chat.completions.create(**asked, tool_choice=choice).choices[0].message
        assert said.content
        assert not said.tool_calls


@IN_ONE_MODE
def test_a_structured_output_fits_its_schema(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": chat(1)["messages"], "response_format": IN_SCHEMA}
    done = client.chat.completions.create(**asked, temperature=0, max_tokens=60)
    place = json.loads(done.choices[0].message.content or "")
    assert place["city"] in {"Rome", "Oslo"}
    assert isinstance(place["big"], bool)


@IN_ONE_MODE
def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    messages: Any = chat(1)["messages"]
    with pytest.raises(openai.NotFoundError, match="'another'"):
        client.chat.completions.create(model="another", messages=messages)
    # In vLLM's words.
    with pytest.raises(openai.BadRequestError, match="temperature must be non-negative"):
        client.chat.completions.create(model=NAME, messages=messages, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="max_model_len"):
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=10**6)


# -- byte for byte ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", REQUESTS)
def test_every_byte_is_vllms(served: ServedGateway, name: str) -> None:
    path, body = REQUESTS[name]
    headers = {"X-Request-Id": "same-id"}
    with served.directly() as vllm, httpx.Client(base_url=served.url, timeout=60.0) as gateway:
        vllm.post(path, json=body)
        for _ in range(3):
            ours, theirs = _ask_until_alike(gateway, vllm, path, json=body, headers=headers)
            assert undated(ours.content) == undated(theirs.content)
            assert ours.status_code == theirs.status_code
            assert ours.headers["x-request-id"] == "same-id"
            for header in ("content-type", "content-length", "transfer-encoding"):
                assert ours.headers.get(header) == theirs.headers.get(header)


def _ask_until_alike(
    gateway: httpx.Client, vllm: httpx.Client, path: str, **request: Any
) -> tuple[httpx.Response, httpx.Response]:
    """An answer of each, equal if both ever said the same.

    Where the engine is faster than its server, vLLM sends two tokens in one event: what it says can
    differ from one time to the next, on a busy machine often.
    """
    ours: dict[bytes, httpx.Response] = {}
    theirs: dict[bytes, httpx.Response] = {}
    for _ in range(20):
        for client, said in ((gateway, ours), (vllm, theirs)):
            response = client.post(path, **request)
            said[undated(response.content)] = response
        if alike := ours.keys() & theirs.keys():
            content = alike.pop()
            return ours[content], theirs[content]
    return ours.popitem()[1], theirs.popitem()[1]


def undated(body: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b'"created":0', body)


# -- many at once ----------------------------------------------------------------------------


async def test_as_many_users_as_permits_all_finish(served: ServedGateway) -> None:
    seen = await burst(served, PERMITS)
    assert all(reply.finished for reply in seen.replies)
    assert seen.at_vllm <= PERMITS


@pytest.mark.parametrize("runs", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_more_users_than_permits_all_finish_and_never_overrun(
    served: ServedGateway, runs: int
) -> None:
    most = waited = 0.0
    for _ in range(runs):
        async with asyncio.timeout(60.0):
            seen = await burst(served, PERMITS + 50)
        assert all(reply.finished for reply in seen.replies)
        assert max(seen.at_vllm, seen.in_flight) <= PERMITS
        assert seen.queued <= 50
        most, waited = max(most, seen.at_vllm), max(waited, seen.waited)
    # vLLM's own count lags while it is busy, and clients on a busy machine come one after the
    # other; but not always.
    assert most > 1
    assert waited > 0.1


async def late_replies(url: str) -> tuple[list[Reply], float]:
    """What 50 users are told who find no place, and for how long the machine stood still."""
    async with Users(url) as users, asyncio.TaskGroup() as group, Heartbeat() as heart:
        # The permits of an earlier try are free again: otherwise the early users wait, too.
        await users.until_held(in_flight=0, queued=0, seconds=30.0)
        early = [group.create_task(users.ask(chat(ENDLESS, i))) for i in range(PERMITS)]

        async def full() -> bool:
            ended = [task.result() for task in early if task.done()]
            assert not ended, f"an answer without end has ended: {ended[0]}"
            return await users.metrics(IN_FLIGHT) == (PERMITS,)

        await until(full, 30.0)
        asked = [group.create_task(ask_alone(url, chat(8))) for _ in range(50)]
        # A pause of the machine before the deadline delays no request, unless it pauses
        # between a request's way out and its arrival: see the repetition below.
        await asyncio.sleep(1.95)
        heart.lost = 0.0
        late = await asyncio.gather(*asked)
        lost = heart.lost
        # They waited for a permit and got none: no request had finished.
        assert not any(task.done() for task in early)
        for task in early:
            task.cancel()
    return late, lost


@IN_ONE_MODE
async def test_requests_that_wait_too_long_get_retry_after(
    served: ServedGateway, tmp_path: Path
) -> None:
    settings = {"max_concurrent_requests": PERMITS, "queue_wait_timeout_seconds": 2}
    slowest, most = list[float](), 2.0 + 0.2 * PACE
    with in_front_of(served, tmp_path, **settings) as strict:
        # A machine that others use may stand still at the wrong moment, but not every time.
        while len(slowest) < 10 and (not slowest or slowest[-1] > most):
            late, lost = await late_replies(strict.url)
            slowest.append(max(reply.seconds for reply in late) - lost)
            assert [reply.status for reply in late] == [503] * 50
            for reply in late:
                assert reply.headers is not None
                assert int(reply.headers["retry-after"]) >= 1
                assert json.loads(reply.body)["error"]["code"] == "queue_timeout"
                assert reply.seconds >= 2.0
    print(f"the slowest of 50, in each try: {[round(seconds, 3) for seconds in slowest]} s")
    assert min(slowest) <= most


# -- clients that leave ----------------------------------------------------------------------


async def test_clients_that_leave_free_everything(served: ServedGateway) -> None:
    chance, go = random.Random(5), asyncio.Event()
    async with Users(served.url) as users, Users(served.vllm_url) as vllm:

        async def leave(number: int) -> Reply:
            reply = Reply()
            body = chat(ENDLESS, about=number, stream=number % 3 == 0)
            asking = asyncio.create_task(users.ask(body, reply))

            async def begun() -> bool:
                return reply.status == 200

            await go.wait()
            if number % 6 == 0:
                # In mid-stream, however long the machine takes for a first byte.
                await until(begun, 60.0)
            await asyncio.sleep(chance.uniform(0.05, 1.5))
            asking.cancel()
            await asyncio.wait([asking])
            return reply

        async def engine_is_idle() -> bool:
            return await vllm.metrics(RUNNING, WAITING) == (0, 0)

        async def nothing_is_connected() -> bool:
            return await users.metrics(CONNECTIONS) == (0,)

        await until(nothing_is_connected, 15.0)
        before = await users.metrics(ENDED, GRANTED)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(leave(i)) for i in range(PERMITS + 60)]
            await users.until_held(in_flight=PERMITS, queued=60, seconds=30.0)
            # Of the others the gateway may see so late that they left that all had a permit.
            queued = [group.create_task(users.ask(chat(ENDLESS, about=i))) for i in range(10)]
            await users.until_held(in_flight=PERMITS, queued=70, seconds=30.0)
            for each in queued:
                each.cancel()
            await users.until_held(in_flight=PERMITS, queued=60, seconds=30.0)
            go.set()
        replies = [task.result() for task in asked]
        seconds = await until(engine_is_idle, 10.0)
        await users.until_held(in_flight=0, queued=0, seconds=10.0)
        after = await users.metrics(ENDED, GRANTED)
        ended, granted = after[0] - before[0], after[1] - before[1]
        print(f"idle after {seconds:.3f} s; {ended:.0f} left, {ended - granted:.0f} in the queue")
        assert not any(reply.whole for reply in replies)
        assert PERMITS <= granted <= ended - len(queued) <= len(replies)
        # Before the first byte, and in mid-stream.
        assert min(sum(r.status == code for r in replies) for code in (0, 200)) >= 10
        # What the leavers used was cut; what is idle is dropped after a while.
        await until(nothing_is_connected, 15.0)


# -- the operator's side ---------------------------------------------------------------------


def test_proofs_docs_and_engine_metrics_are_served_beside_chat(served: ServedGateway) -> None:
    assert served.get("/docs").status_code == 200
    assert served.get("/v1/health").json() == {"status": "ok"}
    assert served.metric("process_open_fds") > 0
    if not served.embedded:
        assert served.get("/api/v1/pow/status").status_code == 404
        return
    httpx.post(f"{served.url}/v1/chat/completions", json=chat(4), timeout=60.0).raise_for_status()
    assert served.metric("vllm:request_success_total") > 0
    assert served.get("/api/v1/pow/status").json()["status"] == "IDLE"
    body = {**ROUND, "nonces": [0, 1, 2], "wait": True}
    proved = httpx.post(f"{served.url}/api/v1/pow/generate", json=body, timeout=60.0)
    assert [artifact["nonce"] for artifact in proved.json()["artifacts"]] == [0, 1, 2]


@asynccontextmanager
async def sending_slowly(url: str) -> AsyncIterator[None]:
    """A user whose request is not there yet: until he leaves, the gateway has one in flight."""
    address = urlsplit(url)
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n{{".encode())
    # One that asks afterwards is answered afterwards, so ours has been seen.
    await asyncio.to_thread(httpx.get, f"{url}/v1/health", timeout=60.0)
    try:
        yield
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_shutdown_under_load_breaks_no_answer_and_leaves_nothing(
    served: ServedGateway,
) -> None:
    assert bool(children := served.children()) is served.embedded
    replies: list[Reply] = []

    async def user(users: Users, number: int) -> None:
        status = 200
        while status == 200:
            replies.append(await users.ask(chat(60, about=number, stream=number % 4 > 0)))
            status = replies[-1].status

    async with Users(served.url) as users:
        asking = [asyncio.create_task(user(users, number)) for number in range(30)]

        async def busy() -> bool:
            return len(replies) > 30

        await until(busy, 30.0)
        async with sending_slowly(served.url):
            code = asyncio.create_task(asyncio.to_thread(served.end))
            await asyncio.gather(*asking)
        assert await code == 0
    refused = [reply for reply in replies if reply.status == 503]
    assert {reply.status for reply in replies} == {200, 503}
    assert all(reply.finished for reply in replies if reply.status == 200)
    assert len(refused) == 30
    for reply in refused:
        assert (reply.headers or {})["connection"] == "close"
        assert json.loads(reply.body)["error"]["code"] == "shutting_down"
    assert psutil.wait_procs(children, timeout=10.0)[1] == []
