"""The official clients and one trace through a gateway and a real node, beside a round."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, ToolUseBlock
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.serving import Server, plan_for, serving
from proofserve.gateway.records import ClientSpec
from proofserve.gateway.tracing import Traces
from proofserve.wire import RECEIPTS
from support.collector import Collector
from support.gateway_requests import NAMED, WEATHER
from support.node import NAME, ServedNode
from support.pace import until

pytestmark = [pytest.mark.engine, pytest.mark.anyio]
ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "Is it warm?"}]}
CITIES = {"Rome", "Oslo"}
FUNCTION: Any = WEATHER["function"]
# In Anthropic's words.
TOOL: Any = {"name": "weather", "input_schema": FUNCTION["parameters"], "strict": True}
CALLED: Any = {"type": "tool", "name": "weather"}


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def gateway(
    node: ServedNode, memory: InMemorySpanExporter, no_collections: None
) -> AsyncIterator[Server]:
    """In front of the node, which works on a round."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    plan = plan_for(
        node.server.url, clients=(ClientSpec(name="anna", key="k"),), receipts_path=RECEIPTS
    )
    async with serving(plan, traces=Traces(provider)) as server:
        node.start_round()
        await until(lambda: node.processed() >= 16)
        yield server
        assert node.status()["status"] == "GENERATING"


async def has_receipt(gateway: Server, answer_id: str, **headers: str) -> bool:
    url = f"http://127.0.0.1:{gateway.port}/v1/receipts/{answer_id}"
    async with httpx.AsyncClient(timeout=60.0) as http:

        async def logged() -> bool:
            found = await http.get(url, headers=headers)
            return found.status_code != httpx.codes.TOO_EARLY

        await until(logged)
        (receipt,) = (await http.get(url, headers=headers)).json()["receipts"]
    return bool(receipt["receipt"]["response_id"] == answer_id)


async def once_whole(ask: Callable[[], Awaitable[Any]]) -> Any:
    """A call of the tool. The model often writes blanks in it up to its limit of tokens."""
    for _ in range(50):
        try:
            if found := await ask():
                return found
        except json.JSONDecodeError:
            pass
    raise AssertionError("the model never ended a call")


def city_in(arguments: str) -> object:
    return json.loads(arguments)["city"] if arguments else None


def tool_of(message: Message) -> ToolUseBlock | None:
    (block,) = message.content
    whole = isinstance(block, ToolUseBlock) and block.input.get("city") in CITIES
    return block if whole else None  # type: ignore[return-value] # by its type


async def test_openais_client_whole_streamed_and_with_tools(gateway: Server) -> None:
    url = f"http://127.0.0.1:{gateway.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        chats = client.chat.completions
        asked = {**ASKED, "temperature": 0, "max_tokens": 20}
        whole = await chats.create(**asked)
        parts = [part async for part in await chats.create(**asked, stream=True)]
        said = "".join(part.choices[0].delta.content or "" for part in parts)
        assert said == whole.choices[0].message.content != ""
        asked = {**ASKED, "max_tokens": 100, "tools": [WEATHER], "tool_choice": NAMED}

        async def called() -> object:
            for call in (await chats.create(**asked)).choices[0].message.tool_calls or []:
                assert call.type == "function"
                return city_in(call.function.arguments)
            return None

        async def streamed() -> object:
            text = ""
            async for part in await chats.create(**asked, stream=True):
                for piece in part.choices[0].delta.tool_calls or []:
                    text += (piece.function and piece.function.arguments) or ""
            return city_in(text)

        assert await once_whole(called) in CITIES
        assert await once_whole(streamed) in CITIES
        assert await has_receipt(gateway, whole.id, Authorization="Bearer k")


async def test_anthropics_client_whole_streamed_and_with_tools(gateway: Server) -> None:
    url = f"http://127.0.0.1:{gateway.port}"
    greedy = {"temperature": 0}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client:
        asked = {**ASKED, "max_tokens": 20, "extra_body": greedy}
        counted = await client.messages.count_tokens(**ASKED)
        whole = await client.messages.create(**asked)
        assert whole.usage.input_tokens == counted.input_tokens
        assert whole.usage.output_tokens == 20
        async with client.messages.stream(**asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole.content[0].text  # type: ignore[union-attr]
            assert (await stream.get_final_message()).usage == whole.usage
        asked = {**ASKED, "max_tokens": 100, "tools": [TOOL]}

        async def called() -> ToolUseBlock | None:
            answer = await client.messages.create(**asked, tool_choice=CALLED)
            return tool_of(answer)

        async def streamed() -> ToolUseBlock | None:
            async with client.messages.stream(**asked, tool_choice=CALLED) as stream:
                return tool_of(await stream.get_final_message())

        block = await once_whole(called)
        assert block.name == (await once_whole(streamed)).name == "weather"
        # What the tool said goes back to the model.
        answered: Any = [
            *ASKED["messages"],
            {
                "role": "assistant",
                "content": [block.model_dump(include={"type", "id", "name", "input"})],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "Warm."}],
            },
        ]
        end = await client.messages.create(
            **{**asked, "messages": answered, "tool_choice": {"type": "none"}}
        )
        assert end.content[0].type == "text"
        assert await has_receipt(gateway, whole.id, **{"X-Api-Key": "k"})
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**{**asked, "extra_body": {"temperature": -1}})
    (series,) = gateway.gateway.totals.series.values()
    assert series.completion_tokens >= 40
    assert series.prompt_tokens >= 2 * counted.input_tokens


async def test_a_chat_is_one_trace_from_the_clients_header_to_its_waits_for_proofs(
    gateway: Server, memory: InMemorySpanExporter, collector: Collector
) -> None:
    url = f"http://127.0.0.1:{gateway.port}/v1"

    def ours(trace: str) -> dict[str, Any]:
        spans = memory.get_finished_spans()
        return {each.name: each for each in spans if f"{each.context.trace_id:032x}" == trace}

    async def waited(number: int) -> str | None:
        """The trace of a chat, None if no forward kept it waiting."""
        trace = f"{number:032x}"
        header = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
        await client.chat.completions.create(**ASKED, max_tokens=4, extra_headers=header)
        await until(lambda: collector.of_trace(trace, "llm_request"))
        return trace if collector.of_trace(trace, "wait for proofs") else None

    async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
        number, trace = 1, await waited(1)
        while trace is None:
            # Whether a forward runs when a chat arrives is chance.
            assert number < 50
            number += 1
            trace = await waited(number)
    await until(lambda: len(ours(trace)) == 3)
    request, queue, attempt = (
        ours(trace)[n] for n in ("POST /v1/chat/completions", "queue", "backend")
    )
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert queue.parent.span_id == attempt.parent.span_id == request.context.span_id
    (first_byte,) = attempt.events
    assert queue.end_time <= first_byte.timestamp <= attempt.end_time <= request.end_time
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    (of_engine,) = collector.of_trace(trace, "llm_request")
    waits = collector.of_trace(trace, "wait for proofs")
    assert {each.parent for each in (of_engine, *waits)} == {f"{attempt.context.span_id:016x}"}
    for wait in waits:
        assert attempt.start_time < wait.start <= wait.end < first_byte.timestamp
