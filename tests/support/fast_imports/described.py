"""Compares every answer of our servers, and every callback that they store, with docs/api.

What differs goes into the file that the variable ``PROOFSERVE_TEST_FAULTS`` names, and fails the
test that finds it there (``conftest.py``). Servers that tests start are watched as well.
"""

import json
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FAULTS = "PROOFSERVE_TEST_FAULTS"
FOLDER = Path(__file__).parents[3] / "docs" / "api"
# Routes by the package of their function. The routes of a node are those of a fleet, too.
PACKAGES = {"api": "node", "fleet": "fleet", "gateway": "gateway", "receiver": "receiver"}
CALLBACKS = ("generated", "validated", "logged")
# Of other methods, error handlers of tests, clients that have left, faults that a test makes.
OTHERS = frozenset({405, 418, 499, 500})


@cache
def page(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.openapi.json").read_text())
    return found


@cache
def validator(name: str, path: str, method: str, status: int) -> Any:
    """That of a JSON answer; None if the page has another kind. Raises KeyError for no answer."""
    import jsonschema_rs

    answers = page(name)["paths"][path][method.lower()]["responses"]
    code = str(status) if str(status) in answers else f"{status // 100}XX"
    schema = answers[code].get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        return None
    return jsonschema_rs.Draft202012Validator({**schema, "components": page(name)["components"]})


@cache
def of_callback(endpoint: str) -> Any:
    import jsonschema_rs

    file = FOLDER / f"callback-{endpoint}.schema.json"
    return jsonschema_rs.Draft202012Validator(json.loads(file.read_text()))


def say(text: str) -> None:
    with Path(os.environ[FAULTS]).open("a") as file:
        file.write(text + "\n")


def check(name: str, path: str, method: str, status: int, answer: bytes | None) -> None:
    """Of an answer that is no JSON, None, only whether there is one with this status."""
    try:
        schema = validator(name, path, method, status)
        if schema is not None and answer is not None:
            schema.validate(json.loads(answer))
    except KeyError:
        say(f"{name}: {method} {path} answers {status}, which its page does not have")
    except ValueError as error:
        say(f"{name}: {method} {path} {status}: {error}"[:2000])


def check_callback(endpoint: str, body: bytes) -> None:
    try:
        of_callback(endpoint).validate(json.loads(body))
    except ValueError as error:
        say(f"a stored callback of {endpoint}: {error}"[:2000])


class Heard:
    """One request and its answer. Only callbacks are kept of requests."""

    def __init__(self, route: Any, scope: Any, receive: Any, send: Any) -> None:
        self._receive, self._send = receive, send
        self._path, self._method = route.path_format, scope["method"]
        kind = PACKAGES[package_of(route)]
        is_fleet = getattr(scope.get("app"), "title", "") == "proofserve fleet"
        self._page = "fleet" if is_fleet else kind
        endpoint = self._path.rpartition("/")[2]
        takes_callbacks = kind in ("receiver", "fleet") and self._method == "POST"
        self._callback = endpoint if takes_callbacks and endpoint in CALLBACKS else ""
        self._asked, self._answered, self._status = bytearray(), bytearray(), 0
        self._is_json = False

    async def receive(self) -> Any:
        message = await self._receive()
        if self._callback:
            self._asked.extend(message.get("body", b""))
        return message

    async def send(self, message: Any) -> None:
        self._status = message.get("status", self._status)
        kinds = [value for name, value in message.get("headers", ()) if name == b"content-type"]
        self._is_json |= any(kind.startswith(b"application/json") for kind in kinds)
        self._answered.extend(message.get("body", b""))
        await self._send(message)

    def check(self) -> None:
        if self._status and self._status not in OTHERS:
            answer = bytes(self._answered) if self._is_json else None
            check(self._page, self._path, self._method, self._status, answer)
        if self._callback and self._status == 200:
            check_callback(self._callback, bytes(self._asked))


def package_of(route: Any) -> str:
    """That of its function; empty for a route of a test, or of vLLM."""
    root, _, rest = route.endpoint.__module__.partition(".")
    return str(rest).partition(".")[0] if root == "proofserve" else ""


def watch() -> None:
    """From now on; call it again for nothing. A host with a GPU may lack the tools of tests."""
    if None in map(find_spec, ("fastapi", "jsonschema_rs")):
        return
    from fastapi.routing import APIRoute

    plain = APIRoute.handle
    if plain.__module__ == __name__:
        return

    async def handle(route: APIRoute, scope: Any, receive: Any, send: Any) -> None:
        if package_of(route) in PACKAGES and route.include_in_schema and FAULTS in os.environ:
            heard = Heard(route, scope, receive, send)
            await plain(route, scope, heard.receive, heard.send)
            heard.check()
        else:
            await plain(route, scope, receive, send)

    APIRoute.handle = handle  # type: ignore[method-assign]


class Watching:
    """Finds no module, and begins to watch before the first one of our routes is imported."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name in ("proofserve.api", "proofserve.gateway", "proofserve.receiver"):
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            watch()
