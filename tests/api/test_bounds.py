"""Limits: the size of a request, requests per minute, and waiting calls."""

import asyncio
import gzip
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.distance_bodies import CLAIMS
from api.distance_bodies import ROUND as DISTANCE
from api.support import GENERATE, JOB, ORDER, RAW, START, Server, said, serving
from proofserve.api.access import Access, Caller, CallLimits, Role, known_key
from proofserve.api.requests import holds_more_values

pytestmark = pytest.mark.anyio


async def test_a_body_above_the_limit_is_413_with_and_without_a_content_length() -> None:
    text = json.dumps(ORDER).encode()

    async def pieces(body: bytes) -> Any:
        for start in range(0, len(body), 10):
            yield body[start : start + 10]

    async with serving(max_body_bytes=len(text)) as server:
        for body in (text + b" ", b"x" * 100_000):
            for content in (body, pieces(body)):
                response = await server.client.post(START, content=content, headers=RAW)
                assert response.status_code == 413
                assert response.json() == {
                    "detail": f"the body has more than {len(text)} bytes (POC_MAX_BODY_BYTES)"
                }
        lying = {**RAW, "content-length": "9" * 5000}
        assert (await server.client.post(START, content=b"", headers=lying)).status_code == 413
        assert (await server.status())["status"] == "IDLE"
        response = await server.client.post(START, content=pieces(text), headers=RAW)
        assert response.status_code == 200


async def test_the_server_stops_reading_a_body_above_the_limit() -> None:
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 1000
            yield b" " * 1000

    async with serving(max_body_bytes=5000) as server:
        response = await server.client.post(START, content=endless(), headers=RAW)
        assert response.status_code == 413
    assert read <= 10_000


async def test_a_compressed_body_is_not_unpacked(server: Server) -> None:
    bomb = gzip.compress(b" " * 50_000_000 + json.dumps(ORDER).encode())
    for headers in ({**RAW, "content-encoding": "gzip"}, RAW):
        response = await server.client.post(START, content=bomb, headers=headers)
        assert response.status_code in (400, 422)
    assert (await server.status())["status"] == "IDLE"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (GENERATE, {**JOB, "nonces": list(range(51))}, "nonces"),
        (
            GENERATE,
            {**JOB, "validation": {"artifacts": [{"nonce": 1, "vector_b64": ""}] * 51}},
            "validation.artifacts",
        ),
        ("/validate", {**CLAIMS, "nonces": list(range(51)), "dist": [1.0] * 51}, "nonces"),
    ],
)
async def test_a_list_above_the_limit_is_422(
    server: Server, path: str, body: dict[str, Any], field: str
) -> None:
    await server.post("/init/validate", DISTANCE)
    response = await server.post(path, body)
    assert response.status_code == 422
    assert f"body.{field}: " in said(response)
    assert "51 are more than the 50 of a request (POC_MAX_QUEUED_NONCES)" in said(response)


@pytest.mark.parametrize("item", ["7", '"x"', "[]", '{"a":1}', "[[[[]]]]"])
async def test_a_body_with_more_values_than_the_nonces_need_is_not_parsed(
    server: Server, item: str
) -> None:
    order = json.dumps({**JOB, "nonces": ["@"]}).replace('"@"', ",".join([item] * 2000))
    response = await server.client.post(GENERATE, content=order, headers=RAW)
    assert response.status_code == 413
    assert response.json() == {
        "detail": "the body has more values than 50 nonces need (POC_MAX_QUEUED_NONCES)"
    }


async def test_a_call_without_a_list_accepts_few_values(server: Server) -> None:
    for path in (START, "/init", "/init/validate", "/stop"):
        response = await server.post(path, {"nonces": [0] * 1100})
        assert response.status_code == 413
        assert response.json() == {"detail": "the body has more values than this call takes"}


async def test_a_call_without_a_list_accepts_few_bytes(server: Server) -> None:
    for path in (START, "/init", "/init/validate", "/stop"):
        response = await server.client.post(path, content=b" " * (2**18 + 1), headers=RAW)
        assert response.status_code == 413
        assert response.json() == {
            "detail": "the body has more than 262144 bytes (this call takes no list)"
        }


@given(
    st.recursive(
        st.none() | st.integers() | st.text('",[{\\a', max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text('",[{\\a', max_size=8), inner, max_size=4)
        ),
        max_leaves=40,
    )
)
def test_values_are_counted_without_parsing(value: Any) -> None:
    body = json.dumps(value).encode()
    many = separators(value)
    assert not many or holds_more_values(body, many - 1)
    assert not holds_more_values(body, many + body.count(b'"'))


def separators(value: Any) -> int:
    """The number of commas and of opening brackets and braces."""
    if isinstance(value, dict):
        inner = sum(map(separators, value.values()))
        return 1 + max(0, len(value) - 1) + inner
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(separators, value))
    return 0


async def test_the_text_of_a_claim_does_not_count_as_values(server: Server) -> None:
    odd = "[,{" * 20_000
    body = {**JOB, "nonces": [1], "validation": {"artifacts": [{"nonce": 1, "vector_b64": odd}]}}
    response = await server.post(GENERATE, {**body, "wait": True})
    assert response.status_code == 200
    assert response.json()["n_mismatch"] == 1


async def test_a_body_of_very_many_keys_is_refused_without_naming_them(server: Server) -> None:
    many = {f"k{number}": 1 for number in range(257)}
    claim = {"nonce": 1, "vector_b64": "", **many}
    for body, where in (
        ({**JOB, **many}, "body: "),
        ({**JOB, "validation": {"artifacts": [claim]}}, "body.validation.artifacts.0: "),
    ):
        response = await server.post(GENERATE, body)
        assert response.status_code == 422
        assert len(response.json()["detail"]) == 1
        assert said(response).startswith(where)
        assert "keys are more than any body has" in said(response)


@pytest.mark.parametrize("field", ["nonces", "dist"])
async def test_the_error_names_the_first_wrong_claim(server: Server, field: str) -> None:
    response = await server.post("/validate", {**CLAIMS, field: ["x"] * 40})
    assert response.status_code == 422
    assert said(response).count(f"body.{field}") == 1


async def test_the_number_of_waiting_calls_is_limited() -> None:
    async with serving(call_limits=CallLimits(open_waits=2)) as server:
        server.engine.latency_s = 0.2
        await server.post("/init/validate", DISTANCE)
        waiting = [
            asyncio.create_task(server.post(GENERATE, {**JOB, "wait": True})),
            asyncio.create_task(server.post("/validate", CLAIMS)),
        ]
        await asyncio.sleep(0.05)
        for path, body in ((GENERATE, {**JOB, "wait": True}), ("/validate", CLAIMS)):
            response = await server.post(path, body)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "5"
            assert "limit is 2 (POC_MAX_OPEN_WAITS)" in response.json()["detail"]
        # A call that does not wait does not count.
        assert (await server.post(GENERATE, JOB)).status_code == 200
        assert [each.status_code for each in await asyncio.gather(*waiting)] == [200, 200]
        assert (await server.post(GENERATE, {**JOB, "wait": True})).status_code == 200


async def test_a_wait_ends_when_its_client_disconnects() -> None:
    async with serving(call_limits=CallLimits(open_waits=1)) as server:
        server.engine.latency_s = 0.2
        leaving = asyncio.create_task(server.post(GENERATE, {**JOB, "wait": True}))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await server.post(GENERATE, {**JOB, "wait": True})).status_code == 200


async def test_each_key_has_its_own_limit_of_requests() -> None:
    keys = [
        known_key("one", Caller("first", Role.OPERATOR)),
        known_key("two", Caller("second", Role.VIEWER, requests_per_minute=5)),
    ]
    async with serving(access=Access(keys), call_limits=CallLimits(per_minute=3)) as server:

        async def statuses(key: str, requests: int) -> list[int]:
            headers = {"Authorization": f"Bearer {key}"}
            return [
                (await server.client.get("/versions", headers=headers)).status_code
                for _ in range(requests)
            ]

        assert await statuses("one", 4) == [200, 200, 200, 429]
        assert await statuses("two", 6) == [200, 200, 200, 200, 200, 429]
        # A request without a key counts for no key.
        assert await statuses("three", 10) == [401] * 10
        refused = await server.client.get("/status", headers={"Authorization": "Bearer one"})
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "first may send 3 requests a minute" in refused.json()["detail"]
        assert "POC_REQUESTS_PER_MINUTE" in refused.json()["detail"]


async def test_a_full_queue_answers_with_retry_after() -> None:
    async with serving() as server:
        await server.post(START, ORDER)
        for _ in range(2):
            await server.post(GENERATE, {**JOB, "nonces": list(range(50))})
        response = await server.post(GENERATE, JOB)
        assert (response.status_code, response.headers["retry-after"]) == (429, "5")
