"""Trace headers pass, and spans tell what a request waited for."""

import asyncio
import builtins
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway.scripted import OK, Call, answer, answers, backends, silent
from gateway.serving import CHAT, never_tried_again, once, plan_for, post, serving, wire
from proofserve.gateway.records import Timeouts
from proofserve.gateway.tracing import Traces, exported
from support.collector import collecting
from support.pace import until

pytestmark = pytest.mark.anyio
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{PARENT}-01"
SENT = (f"traceparent: {GIVEN}", "tracestate: a=1,b=2")


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(memory: InMemorySpanExporter) -> Iterator[Traces]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    made = Traces(provider)
    yield made
    made.close()


def found(memory: InMemorySpanExporter, name: str) -> Any:
    (span,) = [each for each in memory.get_finished_spans() if each.name == name]
    return span


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def id_of(span: Any) -> str:
    return f"{span.context.span_id:016x}"


async def test_without_spans_a_clients_trace_headers_pass_as_they_came() -> None:
    async with backends(answers) as (backend,), serving(plan_for(backend)) as server:
        await once(server.port, post(None, *SENT))
        assert backend.calls[0].header("traceparent") == [GIVEN]
        assert backend.calls[0].header("tracestate") == ["a=1,b=2"]


async def test_a_request_is_a_span_with_its_wait_and_its_attempt_in_the_clients_trace(
    memory: InMemorySpanExporter, traces: Traces
) -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        await go_on.wait()
        await call.send(OK)

    async with backends(waits) as (backend,):
        plan = plan_for(backend, max_concurrent=1)
        async with serving(plan, traces=traces) as server, wire(server.port) as first:
            first.send(post())
            await until(lambda: backend.calls)
            second = asyncio.create_task(once(server.port, post(None, *SENT, path=f"{CHAT}?x=1")))
            await until(lambda: server.gateway.admission.queued)
            go_on.set()
            assert (await second).status == (await first.answer()).status == 200
            await until(lambda: len(memory.get_finished_spans()) == 6)
    spans = memory.get_finished_spans()
    ours = {each.name: each for each in spans if f"{each.context.trace_id:032x}" == TRACE}
    request, queue, attempt = ours[f"POST {CHAT}"], ours["queue"], ours["backend"]
    assert parent_of(request) == PARENT
    assert parent_of(queue) == parent_of(attempt) == id_of(request)
    told = backend.calls[1]
    assert told.header("traceparent") == [f"00-{TRACE}-{id_of(attempt)}-01"]
    assert told.header("tracestate") == ["a=1,b=2"]
    # It waited while the first one was at the backend, and had its first byte before its end.
    assert queue.end_time - queue.start_time > 0
    (first_byte,) = attempt.events
    times = [request.start_time, queue.start_time, queue.end_time, attempt.start_time]
    times += [first_byte.timestamp, attempt.end_time, request.end_time]
    assert times == sorted(times)
    assert first_byte.name == "first byte"
    assert request.attributes == {
        "proofserve.client": "anonymous",
        "gen_ai.request.model": "tiny",
        "http.response.status_code": 200,
        "proofserve.outcome": "ok",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
    }
    assert attempt.attributes == {"server.address": backend.url}


async def test_a_trace_begins_here_without_valid_headers(
    memory: InMemorySpanExporter, traces: Traces
) -> None:
    async with backends(answers) as (backend,), serving(plan_for(backend), traces=traces) as server:
        await once(server.port, post(None, "traceparent: 00-nonsense\xff-01"))
        await until(lambda: len(memory.get_finished_spans()) == 3)
        assert found(memory, f"POST {CHAT}").parent is None
        (told,) = backend.calls[0].header("traceparent")
        assert told.split("-")[2] == id_of(found(memory, "backend"))


async def test_each_attempt_is_a_span_and_a_failure_ends_all(
    memory: InMemorySpanExporter, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_tried_again(monkeypatch)
    async with backends(answer("500 Oops"), silent) as (broken, mute):
        plan = plan_for(broken, mute, timeouts=Timeouts(first_byte=0.2, total=2.0))
        async with serving(plan, traces=traces) as server:
            assert (await once(server.port)).status in (500, 504)
            await once(server.port, post(b"[]"))
            await until(lambda: len(memory.get_finished_spans()) == 5)
    attempts = [each for each in memory.get_finished_spans() if each.name == "backend"]
    assert {each.attributes["server.address"] for each in attempts if each.attributes} == {
        broken.url,
        mute.url,
    }
    relayed, refused = [e for e in memory.get_finished_spans() if e.name == f"POST {CHAT}"]
    assert relayed.status.status_code == refused.status.status_code == StatusCode.ERROR
    assert refused.attributes == {"proofserve.outcome": "invalid_body"}


async def test_spans_leave_for_the_collector_that_the_variables_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "front")
        async with (
            backends(answers) as (backend,),
            serving(plan_for(backend), traces=exported()) as server,
        ):
            await once(server.port, post(None, *SENT))
        # The end of a gateway waits for them.
        found = {(each.name, each.trace, each.service) for each in collector.spans}
    assert found == {(name, TRACE, "front") for name in (f"POST {CHAT}", "queue", "backend")}


def test_without_opentelemetry_a_gateway_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("gone", name=name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", missing)
    with caplog.at_level(logging.WARNING, logger="uvicorn.error"):
        assert exported() is None
    assert "pip install 'proofserve[otel]'" in caplog.text
