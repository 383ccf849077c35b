"""How the relayed paths of vLLM differ: tokens, forms, keys, errors; and paths by option."""

import json
import time
from typing import Any

import anthropic
import openai
import pytest

from gateway.scripted import (
    MODEL,
    SSE_HEAD,
    Call,
    answer,
    answers,
    backends,
    chunk,
    sends,
    sends_then,
    silent,
)
from gateway.serving import Server, once, order, plan_for, post, serving, wire
from proofserve.gateway.gateway import ROUTES
from proofserve.gateway.limits import USUAL_ANSWER, read_form
from proofserve.gateway.metrics import Series
from proofserve.gateway.records import ClientSpec, GatewayPlan, Timeouts
from proofserve.wiring.gateway import other_paths
from support.pace import PACE, until

pytestmark = pytest.mark.anyio
MESSAGES = "/v1/messages"
BUDGET = 100_000
ANNA = ClientSpec(name="anna", key="k", tokens_per_minute=BUDGET)


def named(name: str, body: object) -> bytes:
    """An event of Anthropic's."""
    return chunk(f"event: {name}\ndata: {json.dumps(body, separators=(',', ':'))}\n\n".encode())


SAID: Any = {
    **{"id": "chatcmpl-1", "type": "message", "role": "assistant", "model": MODEL},
    **{"content": [], "stop_reason": None, "stop_sequence": None},
    "usage": {"input_tokens": 5, "output_tokens": 0},
}
STARTS = named("message_start", {"type": "message_start", "message": SAID})
ENDS = (
    named(
        "message_delta",
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 7, "input_tokens": 5, "cache_read_input_tokens": 20},
        },
    ),
    named("message_stop", {"type": "message_stop"}),
    b"0\r\n\r\n",
)
RANKED = [
    {"index": i, "document": {"text": "usage" * 9}, "relevance_score": 0.5} for i in range(99)
]


# -- tokens --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "said", "prompt", "completion"),
    [
        (MESSAGES, {**SAID, "usage": {"input_tokens": 9, "output_tokens": 4}}, 9, 4),
        ("/v1/rerank", {"id": "r", "usage": {"prompt_tokens": 8}, "results": RANKED}, 8, 0),
        ("/v1/score", {"data": RANKED, "usage": {"prompt_tokens": 6, "total_tokens": 6}}, 6, 0),
        ("/tokenize", {"tokens": [1] * 5000, "count": 5000}, 0, 0),
        ("/v1/messages/count_tokens", {"input_tokens": 7}, 0, 0),
        ("/classify", {"usage": {"prompt_tokens": 3}}, 0, 0),
    ],
)
async def test_an_answer_costs_what_its_own_usage_says(
    path: str, said: object, prompt: int, completion: int
) -> None:
    script = answer("200 OK", json.dumps(said).encode())
    async with backends(script) as (backend,):
        plan = plan_for(backend, clients=(ANNA,), other_paths=(b"/classify",))
        async with serving(plan) as server:
            got = await once(server.port, post(None, "Authorization: Bearer k", path=path))
            assert (got.status, json.loads(got.raw)) == (200, said)
            await server.settled()
            counted = series_of(server)
            assert (counted.prompt_tokens, counted.completion_tokens) == (prompt, completion)
            assert left(server) == BUDGET - prompt - completion


def series_of(server: Server) -> Series:
    (series,) = server.gateway.totals.series.values()
    return series


def left(server: Server) -> int:
    """What is left of the key's tokens."""
    (client,) = server.gateway.clients.all()
    assert client._tokens is not None
    return client._tokens.left


async def test_a_stream_of_messages_costs_what_its_last_usage_says_with_cached_tokens() -> None:
    async with (
        backends(sends(SSE_HEAD, STARTS, *ENDS)) as (backend,),
        serving(plan_for(backend)) as server,
    ):
        await once(server.port, post(order(stream=True), path=MESSAGES))
        await server.settled()
        counted = series_of(server)
        assert (counted.prompt_tokens, counted.completion_tokens) == (25, 7)


async def test_what_costs_no_tokens_is_answered_without_any_left() -> None:
    async with backends(answers) as (backend,):
        poor = ClientSpec(name="poor", key="k", tokens_per_minute=1)
        async with serving(plan_for(backend, clients=(poor,))) as server:
            for path, status in (("/tokenize", 200), (MESSAGES, 400)):
                got = await once(server.port, post(None, "X-Api-Key: k", path=path))
                assert got.status == status


# -- forms ---------------------------------------------------------------------------------------


async def test_a_form_goes_to_a_backend_with_its_model_as_it_came() -> None:
    sound = bytes(range(256)) * 200 + b'\r\n name="model"\r\nother'
    said = {"text": "Hi", "usage": {"type": "duration", "seconds": 12}}
    scripts = [answer("200 OK", json.dumps(said).encode(), b"content-type: application/json")] * 2
    async with backends(*scripts) as (small, large):
        large.models = ["large"]
        async with serving(plan_for(small, large, clients=(ANNA,))) as server:
            await until(lambda: all(b.models for b in server.gateway.pool.backends))
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="k") as client:
                for model, backend in ((MODEL, small), ("large", large)):
                    heard = await client.audio.transcriptions.create(
                        model=model, file=("a.wav", sound)
                    )
                    assert heard.text == "Hi"
                    assert sound in backend.calls[-1].body
                with pytest.raises(openai.NotFoundError, match="'huge'"):
                    await client.audio.transcriptions.create(model="huge", file=("a.wav", sound))
            await server.settled()
            assert [len(each.calls) for each in (small, large)] == [1, 1]
            assert {series.audio_seconds for series in server.gateway.totals.series.values()} == {
                12
            }
            # Its tokens are not known, nor are they the bytes of the sound.
            assert left(server) == BUDGET - 2 * USUAL_ANSWER


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n",
        b'--b\r\nContent-Disposition: form-data; filename="model"\r\n\r\nx\r\n--b--',
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n',
        b' name="model"\r\n' * 100_000,
    ],
)
def test_a_form_without_a_model_names_none(body: bytes) -> None:
    assert read_form(body).model is None


def test_a_form_full_of_fields_costs_no_time() -> None:
    body = (b' name="model"' + b"x" * 80 + b"\r\n") * 100_000
    began = time.process_time()
    assert read_form(body).model is None
    # The event loop waits meanwhile; reading every place would take seconds.
    assert time.process_time() - began < 0.5 * PACE


# -- keys, errors --------------------------------------------------------------------------------


def client_of(server: Server, **options: Any) -> anthropic.AsyncAnthropic:
    options = {"api_key": "k", "max_retries": 0, **options}
    return anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{server.port}", **options)


ASKED: Any = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}


async def test_anthropics_client_is_known_by_its_header_which_no_backend_sees() -> None:
    body = json.dumps({**SAID, "usage": {"input_tokens": 9, "output_tokens": 4}}).encode()
    script = answer("200 OK", body, b"content-type: application/json")
    async with backends(script) as (backend,):
        plan = plan_for(backend, clients=(ANNA,), backend_key="theirs")
        async with serving(plan) as server:
            async with client_of(server) as client, client_of(server, api_key="no") as stranger:
                assert (await client.messages.create(**ASKED)).usage.output_tokens == 4
                assert (await client.models.list()).data[0].id == MODEL
                with pytest.raises(anthropic.AuthenticationError, match="X-Api-Key"):
                    await stranger.messages.create(**ASKED)
            assert server.gateway.answered.backend_of(
                f"chatcmpl-{backend.calls[0].header('x-request-id')[0]}", "anna"
            )
        assert backend.calls[0].header("x-api-key") == []
        assert backend.calls[0].header("authorization") == ["Bearer theirs"]


async def test_anthropics_client_raises_its_own_errors_and_waits_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with backends(silent) as (backend,):
        plan = plan_for(backend, max_concurrent=1, queue_limit=0)
        async with serving(plan) as server, wire(server.port) as first, client_of(server) as client:
            first.send(post())
            await until(lambda: backend.calls)
            with pytest.raises(anthropic.ServiceUnavailableError) as full:
                await client.messages.create(**ASKED)
            error = full.value.body["error"]  # type: ignore[index]
            assert (error["type"], error["code"]) == ("overloaded_error", "queue_full")
            seconds = int(full.value.response.headers["retry-after"])
            monkeypatch.setattr("anthropic._base_client.anyio.sleep", sleep)
            with pytest.raises(anthropic.ServiceUnavailableError):
                await client.with_options(max_retries=2).messages.create(**ASKED)
            assert slept == [seconds, seconds]
            with pytest.raises(anthropic.NotFoundError, match="'another'") as unknown:
                await client.messages.create(**{**ASKED, "model": "another"})
            assert unknown.value.type == "not_found_error"


async def test_anthropics_client_sees_a_stream_that_broke() -> None:
    async def closes(call: Call) -> None:
        await call.close()

    async with (
        backends(sends_then(closes, SSE_HEAD, STARTS)) as (backend,),
        serving(plan_for(backend)) as server,
        client_of(server) as client,
    ):
        stream = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="before its answer was complete"):
            _ = [event async for event in stream]


# -- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/classify", *(path.decode() for path in ROUTES)])
async def test_every_path_waits_for_a_permit_and_ends_at_its_deadline(path: str) -> None:
    async with backends(silent) as (backend,):
        plan = plan_for(
            backend,
            max_concurrent=1,
            other_paths=(b"/classify",),
            timeouts=Timeouts(queue=0.1, first_byte=0.5),
        )
        async with serving(plan) as server, wire(server.port) as first:
            first.send(post(path=f"{path}?x=1"))
            await until(lambda: backend.calls)
            assert backend.calls[0].line == f"POST {path}?x=1 HTTP/1.1".encode()
            assert (await once(server.port, post(path=path))).status == 503
            assert (await first.answer()).status == 504


async def test_a_path_that_no_operator_named_is_not_relayed() -> None:
    async with backends(answers) as (backend,), serving(plan_for(backend)) as server:
        assert (await once(server.port, post(path="/collective_rpc"))).status == 404
        assert backend.calls == []


def test_only_paths_can_be_named() -> None:
    assert other_paths(" /classify,/v1/audio/translations ,") == (
        b"/classify",
        b"/v1/audio/translations",
    )
    for wrong in ("classify", "/a?b", "/a b", "/admin/drain", "/a%2Fb"):
        with pytest.raises(ValueError, match="VLLM_OTHER_PATHS"):
            other_paths(wrong)
    assert GatewayPlan(backends=()).other_paths == ()
