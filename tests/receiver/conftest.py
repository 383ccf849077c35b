import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn

from proofserve.receiver.app import MAX_BODY_BYTES, create_app
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.receiver.store import ReceiverStore


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "received.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[ReceiverStore]:
    opened = ReceiverStore.open(path, lambda: 1e9)
    yield opened
    opened.close()


@pytest.fixture
def check() -> SignatureCheck | None:
    """The check of signatures; none, if a file of tests does not override it."""
    return None


@pytest.fixture
def max_body_bytes() -> int:
    """The limit of a body; the default, if a test does not override it."""
    return MAX_BODY_BYTES


@pytest.fixture
def url(store: ReceiverStore, check: SignatureCheck | None, max_body_bytes: int) -> Iterator[str]:
    """A receiver on a real port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(store, check, max_body_bytes)
    config = uvicorn.Config(app, log_config=None, ws="none", http="h11")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False) as opened:
        yield opened
