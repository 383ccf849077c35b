"""Where the log lines of proofserve go, and what they contain."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
from pythonjsonlogger.json import JsonFormatter

from api.support import GENERATE, JOB, ORDER, START, STATUS, STOP, serving
from proofserve.plugin.endpoint import ROOT, log_as

pytestmark = pytest.mark.anyio


@pytest.fixture
def ours() -> Iterator[logging.Logger]:
    """The proofserve logger as new: an engine of another test may have configured it."""
    ours = logging.getLogger(ROOT)
    before = ours.handlers, ours.level, ours.propagate
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield ours
    ours.handlers, level, ours.propagate = before
    ours.setLevel(level)


@pytest.fixture
def written(ours: logging.Logger) -> io.StringIO:
    """The log of a server that writes JSON, with the lines of proofserve."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("%(levelname)s %(name)s %(message)s"))
    server = logging.getLogger("a server")
    server.handlers, server.propagate = [handler], False
    server.setLevel("INFO")
    log_as("a server")
    return stream


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_every_line_of_a_round_has_its_id_and_none_a_key(written: io.StringIO) -> None:
    async with serving() as server:
        order = {**ORDER, "public_key": "k3y-of-the-node", "url": "http://127.0.0.1:1"}
        headers = {"Authorization": "Bearer s3cret", "X-Request-Id": "from-the-client"}
        answer = await server.client.post(START, json=order, headers=headers)
        assert answer.headers["X-Request-Id"] == "from-the-client"
        round_id = (await server.status())["round_id"]
        await server.post(START, order)
        server.engine.faults = 10
        await server.post(STOP)
    logged = lines(written)
    assert {line["round_id"] for line in logged} == {round_id}
    assert [line["message"] for line in logged][:2] == [
        f"round {round_id} generates",
        f"request from-the-client, round {round_id}: POST /api/v1/pow/init/generate: 200 served",
    ]
    assert any("409 already_generating" in str(line["message"]) for line in logged)
    assert any(f"round {round_id} ended after" in str(line["message"]) for line in logged)
    assert "s3cret" not in written.getvalue()
    assert "k3y" not in written.getvalue()


async def test_the_end_of_a_job_is_a_line_with_its_id(written: io.StringIO) -> None:
    async with serving() as server:
        server.engine.faults = 1
        request_id = (await server.post(GENERATE, JOB)).json()["request_id"]
        await server.ended(request_id)
    (line,) = [each for each in lines(written) if each.get("request_id") == request_id]
    assert (
        line["message"] == f"job {request_id} of 4 nonces: failed: the toy engine was told to fail"
    )


async def test_a_request_id_that_could_forge_a_line_is_replaced(written: io.StringIO) -> None:
    async with serving() as server:
        forged = {"X-Request-Id": "x: 200 served"}
        answer = await server.client.post(STOP, headers=forged)
        assert re.fullmatch(r"[0-9a-f]{32}", answer.headers["X-Request-Id"])
    assert "x: 200" not in written.getvalue()


async def test_requests_that_change_nothing_leave_no_line(written: io.StringIO) -> None:
    async with serving() as server:
        await server.get(STATUS)
        await server.get("/health/ready")
    assert written.getvalue() == ""


def test_a_logger_that_is_already_configured_stays_as_it_is(ours: logging.Logger) -> None:
    ours.setLevel("ERROR")
    log_as("another server")
    assert (ours.handlers, ours.level) == ([], logging.ERROR)
