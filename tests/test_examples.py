"""The programs in ``examples`` run as they are, against callbacks and nodes of this code."""

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from proofserve.outbox.planning import Delivery
from proofserve.outbox.sender import Outward, new_client, post
from proofserve.wiring.launch import free_port
from receiver.support import generated
from support.committed import fake_node
from support.pace import wait_until

EXAMPLES = Path(__file__).parent.parent / "examples"
SECRET = "the secret of both"  # noqa: S105
BODY = json.dumps(generated(1, 2)).encode()


@dataclass(frozen=True)
class Running:
    """A receiver; ``stored`` has the bodies of what it took, by key."""

    url: str
    stored: Callable[[], Mapping[str, bytes]]


def of_sqlite(store: Path) -> Mapping[str, bytes]:
    with closing(sqlite3.connect(store)) as file:
        return dict(file.execute("SELECT key, body FROM callbacks").fetchall())


def of_folder(store: Path) -> Mapping[str, bytes]:
    return {each.stem.partition("-")[2]: each.read_bytes() for each in store.glob("*.json")}


RECEIVERS: dict[str, tuple[str | None, Callable[[Path], Mapping[str, bytes]]]] = {
    "receiver.py": (sys.executable, of_sqlite),
    "receiver.mjs": (shutil.which("node"), of_folder),
}


@contextmanager
def running(name: str, folder: Path) -> Iterator[Running]:
    program, stored = RECEIVERS[name]
    if program is None:
        pytest.skip("Node.js is not installed here")
    port, store = free_port(), folder / "stored"
    environment = {**os.environ, "POC_CALLBACK_SECRET": SECRET, "STORE": str(store)}
    argv = (program, EXAMPLES / name, str(port))
    with subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: listens(port))
            yield Running(f"http://127.0.0.1:{port}", lambda: stored(store))
        finally:
            process.kill()


def listens(port: int) -> bool:
    with socket.socket() as trying:
        return trying.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=RECEIVERS)
def receiver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with running(request.param, tmp_path_factory.mktemp("receiver")) as made:
        yield made


def sent(url: str, key: str = "k1", secret: str | None = SECRET, age_s: float = 0.0) -> str | None:
    """What the sender of an outbox says of its callback: None if it was taken."""
    delivery = Delivery(1, "generated", url, key, 7, 0, None)
    signs = None if secret is None else secret.encode()
    outward = Outward(secret=signs, clock=lambda: time.time() - age_s)

    async def once() -> str | None:
        async with new_client(outward) as client:
            return await post(client, outward, delivery, BODY, 10.0)

    return asyncio.run(once())


def test_a_callback_is_stored_once(receiver: Running) -> None:
    assert [sent(receiver.url), sent(receiver.url)] == [None, None]
    assert receiver.stored()["k1"] == BODY


@pytest.mark.parametrize(
    "wrong", [{"secret": "another"}, {"secret": None}, {"age_s": 600.0}, {"age_s": -600.0}]
)
def test_a_callback_that_is_not_signed_now_is_refused(
    receiver: Running, wrong: dict[str, Any]
) -> None:
    assert str(sent(receiver.url, key="k2", **wrong)).startswith("HTTP 401")
    assert "k2" not in receiver.stored()


@pytest.mark.parametrize("part", ["body", "key", "sequence", "endpoint"])
def test_a_callback_that_was_changed_on_the_way_is_refused(receiver: Running, part: str) -> None:
    signed: list[httpx.Request] = []

    def keep(request: httpx.Request) -> httpx.Response:
        signed.append(request)
        return httpx.Response(204)

    async def signing() -> None:
        outward = Outward(secret=SECRET.encode())
        async with httpx.AsyncClient(transport=httpx.MockTransport(keep)) as client:
            delivery = Delivery(1, "generated", receiver.url, f"of-{part}", 7, 0, None)
            assert await post(client, outward, delivery, BODY, 10.0) is None

    asyncio.run(signing())
    (request,) = signed
    url, body, headers = str(request.url), request.content, dict(request.headers)
    if part == "body":
        body = body.replace(b"b10c", b"b10d")
    elif part == "endpoint":
        url = url.replace("generated", "validated")
    else:
        name = {"key": "idempotency-key", "sequence": "x-proofserve-sequence"}[part]
        headers[name] = "8"
    assert httpx.post(url, content=body, headers=headers).status_code == 401
    assert not {f"of-{part}", "8"} & receiver.stored().keys()
    assert httpx.post(str(request.url), content=BODY, headers=request.headers).is_success


def test_the_round_by_curl_runs_and_its_answers_are_as_shown(tmp_path: Path) -> None:
    script = EXAMPLES / "round.sh"
    with (
        running("receiver.py", tmp_path) as receiver,
        fake_node(tmp_path, callback_secret=SECRET, api_key="key") as node,
    ):
        own = {"NODE": node.url, "MODEL": "toy", "RECEIVER": receiver.url, "POC_API_KEY": "key"}
        done = subprocess.run(
            ["sh", script], env={**os.environ, **own}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: len(receiver.stored()) > 0)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    for shown, found in zip(shown_in(script), answers, strict=True):
        assert fields(shown) <= fields(found)


def shown_in(script: Path) -> list[Any]:
    """The JSON in its comments."""
    lines = script.read_text().splitlines()
    calls = "\n".join(line[1:] if line.startswith(("# {", "#  ")) else "" for line in lines)
    texts = [text for text in calls.split("\n\n") if text.strip().startswith("{")]
    return [json.loads(text) for text in texts]


def fields(value: Any, path: str = "") -> set[str]:
    """The places of all fields in a JSON value, but for those that it leaves out."""
    found = set()
    for name, part in value.items() if isinstance(value, dict) else ():
        if name != "…":
            found |= {f"{path}.{name}"} | fields(part, f"{path}.{name}")
    for part in value if isinstance(value, list) else ():
        found |= fields(part, f"{path}[]")
    return found
