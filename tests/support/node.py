"""A served node as its users see it: HTTP, a process tree, a file on disk."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from proofserve.cli.servers import ServerOptions, small_server
from proofserve.host import quick_dtype
from proofserve.wiring.launch import Server, free_port, running_server
from support.pace import PACE

NAME = "tiny"
PARAMS = {"model": NAME, "seq_len": 64, "k_dim": 12}
ROUND = {
    "block_hash": "0xabc",
    "block_height": 7,
    "public_key": "node-key",
    "node_id": 0,
    "node_count": 1,
    "params": PARAMS,
    "batch_size": 16,
}
# A GPU's engine of one rank computes in its own process, by this class. On a CPU, vLLM would choose
# a second process for it, which imports everything again: `proofserve demo`, a server of
# test_restarts.py, and engines of several ranks have it.
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
SECOND_PROCESS = "mp"
# Engines of tests compute in this. Without instructions for bfloat16 each forward of theirs would
# take ten times as long, and the waits of nodes and gateways would be about the processor.
DTYPE = quick_dtype()
IN_ONE_PROCESS = ("--distributed-executor-backend", ONE_PROCESS)


DISTANCE_ROUND = {
    "block_hash": "0xabc",
    "block_height": 7,
    "public_key": "node-key",
    "node_id": 0,
    "node_count": 1,
    "r_target": 2.0,
    "seq_len": 64,
    "batch_size": 16,
}


class ServedNode:
    """A running server; ``call`` speaks to the proof API, ``chat`` to vLLM's own."""

    def __init__(self, server: Server, api_key: str | None = None) -> None:
        self.server = server
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=server.url, timeout=120.0, headers=headers)

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self._http.request(method, f"/api/v1/pow{path}", json=body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        response = self.request(method, path, body)
        assert response.is_success, response.text
        return response.json()

    def status(self) -> Any:
        return self.call("GET", "/status")

    def start_round(self, **changes: Any) -> None:
        self.call("POST", "/init/generate", {**ROUND, **changes})

    def start_distance_round(self, **changes: Any) -> None:
        self.call("POST", "/init/generate", {**DISTANCE_ROUND, **changes})

    def judge(self, winners: list[Any], **changes: Any) -> Any:
        """The verdict about rows of ``results``, by the configured round."""
        body = {name: DISTANCE_ROUND[name] for name in ("public_key", "block_hash", "block_height")}
        body |= {
            "nonces": [winner["nonce"] for winner in winners],
            "dist": [winner["dist"] for winner in winners],
            "node_id": 0,
        }
        return self.call("POST", "/validate", {**body, **changes})

    def stop(self) -> None:
        assert self.call("POST", "/stop")["pow_status"]["status"] == "STOPPED"

    def prove(self, nonces: list[int], **changes: Any) -> Any:
        return self.call("POST", "/generate", {**ROUND, "nonces": nonces, "wait": True, **changes})

    def results(self, after: int = 0) -> list[Any]:
        rows: list[Any] = []
        while page := self.call("GET", f"/results?after={after}&limit=1000")["results"]:
            rows += page
            after = page[-1]["seq"]
        return rows

    def processed(self) -> int:
        return int(self.status()["stats"]["total_processed"])

    def free_blocks(self) -> int:
        return int(engine_of(self.status)["free_blocks"])

    def chat(self, text: str, tokens: int = 16) -> str:
        response = self._http.post(
            "/v1/chat/completions",
            json={
                "model": NAME,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": tokens,
                "temperature": 0,
            },
        )
        assert response.is_success, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    @contextmanager
    def streamed_chat(self, **changes: Any) -> Iterator[Iterator[str]]:
        """The events of a long chat, after its first; reading fails after 40 s of silence."""
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": "Tell me a long story."}],
            "max_tokens": 1900,
            "ignore_eos": True,
            "stream": True,
        }
        request = {"json": {**body, **changes}, "timeout": 40.0}
        with self._http.stream("POST", "/v1/chat/completions", **request) as response:
            events = (line for line in response.iter_lines() if line)
            assert "delta" in next(events)
            yield events

    def family(self) -> list[psutil.Process]:
        """The API process and everything it started."""
        parent = psutil.Process(self.server.process.pid)
        return [parent, *parent.children(recursive=True)]


@contextmanager
def serve(
    model: Path, folder: Path, options: Sequence[str] = (), executor: str = ONE_PROCESS, **poc: str
) -> Iterator[ServedNode]:
    """A node of ``model`` that keeps its files in ``folder``.

    ``options`` are vLLM's own, and so is ``executor``; ``poc`` holds POC_ variables.
    """
    options = ("--distributed-executor-backend", executor, *options)
    wanted = ServerOptions(model, NAME, forward_batch=8, dtype=DTYPE, vllm_options=options)
    command = small_server(wanted, folder)
    command = replace(command, env={**command.env, **poc})
    # vLLM's sockets live there, and the path of a socket must be short; a test's folder is long.
    with TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as sockets:
        command = replace(command, env={**command.env, "TMPDIR": sockets})
        with running_server(command, free_port(), folder / "server.log") as server:
            node = ServedNode(server, poc.get("POC_API_KEY"))
            try:
                yield node
            finally:
                node.close()


def until(
    condition: Callable[[], bool],
    seconds: float = 120.0,
    reached: Callable[[], object] = lambda: None,
) -> None:
    """Wait for ``condition``, for ``seconds`` since ``reached`` last had another value."""
    seconds *= PACE
    last, deadline = reached(), time.monotonic() + seconds
    while not condition():
        if (now := reached()) != last:
            last, deadline = now, time.monotonic() + seconds
        assert time.monotonic() < deadline, f"the condition did not come true, at {last}"
        time.sleep(0.05)


def engine_of(status: Callable[[], Any]) -> Any:
    """The counters in ``status``, which has none as long as the engine is late with its answer."""
    found: list[Any] = []

    def answered() -> bool:
        found[:] = [status()["engine"]]
        return found[0] is not None

    until(answered)
    return found[0]
