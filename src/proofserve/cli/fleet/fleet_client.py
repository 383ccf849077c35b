"""Calls to a fleet, for its commands."""

from typing import Annotated, Any

import httpx
import typer

from proofserve.wire.paths import FLEET

# The exit code of a command that failed.
FAILED = 2
_TIMEOUT_S = 10.0
_PAGE = 500

Url = Annotated[str, typer.Option("--url", envvar="FLEET_URL", help="The fleet: http://HOST:PORT.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="FLEET_API_KEY",
        # The variable may list several keys: the first one is used.
        callback=lambda keys: keys and keys.partition(",")[0],
        help="A key of the fleet, if it needs one.",
    ),
]
MemberName = Annotated[str, typer.Argument(help="Name, id or URL of the member.")]
DEFAULT_URL = "http://127.0.0.1:7100"


def fleet_client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/"), timeout=_TIMEOUT_S, headers=headers)


def call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    try:
        response = client.request(method, path, json=body)
    except httpx.HTTPError as error:
        _fail(f"{client.base_url}: {error or type(error).__name__}")
    if response.is_error:
        try:
            detail = response.json()["detail"]
        except (ValueError, KeyError, TypeError):
            detail = response.text[:500]
        _fail(f"{method} {client.base_url.join(path)}: {response.status_code} {detail}")
    return response.json()


def all_members(client: httpx.Client) -> Any:
    found = call(client, "GET", f"{FLEET}/snapshot?limit={_PAGE}")
    while len(found["members"]) < found["of_members"]:
        offset = len(found["members"])
        page = call(client, "GET", f"{FLEET}/snapshot?offset={offset}&limit={_PAGE}")["members"]
        if not page:
            break
        found["members"] += page
    return found


def named(members: list[Any], name: str) -> Any:
    found = [m for m in members if name.rstrip("/") in (m["name"], m["id"], m["url"])]
    if len(found) != 1:
        names = ", ".join(sorted(str(each["name"]) for each in members)[:20])
        _fail(f"{len(found)} members are called {name!r}; there are: {names or 'none'}")
    return found[0]


def _fail(reason: str) -> Any:
    typer.echo(reason, err=True)
    raise typer.Exit(FAILED)
