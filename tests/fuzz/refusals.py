"""Sends hostile requests and reports the status and time of each refusal."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import NamedTuple

from fuzz.framing import Framed
from fuzz.hostile import Hostile
from fuzz.targets import PATIENCE_S

# A refusal that took too long is tried again: the machine may have been busy.
TRIES = 3
# Bytes. A refusal names the fault and does not repeat the request.
MAX_ANSWER = 10_000


class Refusal(NamedTuple):
    """A request's name, its size in bytes, and the status and time of its refusal."""

    name: str
    size: int
    status: int
    seconds: float


def whole(path: str, hostile: Hostile) -> Framed:
    """A valid request with a hostile body."""
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(hostile.body)}"]
    if hostile.content_type is not None:
        lines.append(f"Content-Type: {hostile.content_type}")
    head = "\r\n".join([*lines, *hostile.lines, "", ""]).encode()
    return Framed(f"{path}: {hostile.name}", head + hostile.body)


def refused(port: int, request: Framed, within_s: float) -> Refusal:
    """The refusal of a request, which is sent up to TRIES times until one comes ``within_s``."""
    for _ in range(TRIES - 1):
        refusal = _refusal(port, request)
        if refusal.seconds < within_s:
            return refusal
    return _refusal(port, request)


def _refusal(port: int, sent: Framed) -> Refusal:
    with (
        ThreadPoolExecutor(1) as sender,
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as client,
        HTTPResponse(client) as answer,
    ):
        began = time.perf_counter()
        # The answer may come before the whole request was sent.
        sender.submit(client.sendall, sent.request)
        answer.begin()
        said = answer.read()
        seconds = time.perf_counter() - began
        client.shutdown(socket.SHUT_RDWR)
    assert 400 <= answer.status < 500, (sent.name, answer.status, said[:1000])
    assert 0 < len(said) < MAX_ANSWER, (sent.name, said[:1000])
    return Refusal(sent.name, len(sent.request), answer.status, seconds)


def slowest(refusals: Sequence[Refusal], count: int = 8) -> str:
    """The slowest refusals as text for the log."""
    order = sorted(refusals, key=lambda each: each.seconds, reverse=True)[:count]
    lines = [
        f"  {1e3 * each.seconds:6.1f} ms  {each.status}  {each.size:>10,} B  {each.name}"
        for each in order
    ]
    return "\n".join([f"{len(refusals)} refusals, the slowest:", *lines])
