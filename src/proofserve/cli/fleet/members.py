"""``proofserve fleet members`` and the commands that cordon, drain and remove one."""

import json as json_format
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proofserve.wire.paths import FLEET

# The exit code of a command that failed.
FAILED = 2
_TIMEOUT_S = 10.0
_PAGE = 500
_COLOURS = {"ready": "green", "lost": "red", "refused": "red"}

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
Reason = Annotated[str, typer.Option(help="Shown to other operators beside the member.")]
DEFAULT_URL = "http://127.0.0.1:7100"


def members(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show the fleet and its members, the worst first, with the reason of each.

    \b
    proofserve fleet members
    proofserve fleet members --url http://fleet:7100 --json
    """
    with _client(url, api_key) as client:
        found = _all_members(client)
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    _show(found)


def cordon(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Give a member nothing new; its lane of the running round goes on."""
    _change("cordon", member, reason, url, api_key)


def drain(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Stop a member's lane, and give it nothing new; what it has proved is still delivered."""
    _change("drain", member, reason, url, api_key)


def uncordon(member: MemberName, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let a cordoned or drained member take part again."""
    _change("uncordon", member, None, url, api_key)


def remove(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Forget a member that joined by itself. Its results stay; it may join again."""
    _change("remove", member, reason, url, api_key)


def _change(what: str, member: str, reason: str | None, url: str, api_key: str | None) -> None:
    with _client(url, api_key) as client:
        found = _named(_all_members(client)["members"], member)
        body = None if reason is None else {"reason": reason}
        answer = _call(client, "POST", f"{FLEET}/members/{found['id']}/{what}", body)
    state = answer.get("state", "removed")
    typer.echo(f"{found['name']}: {state}" + (f" ({reason})" if reason else ""))


def _client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url.rstrip("/"), timeout=_TIMEOUT_S, headers=headers)


def _call(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
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


def _all_members(client: httpx.Client) -> Any:
    found = _call(client, "GET", f"{FLEET}/snapshot?limit={_PAGE}")
    while len(found["members"]) < found["of_members"]:
        offset = len(found["members"])
        page = _call(client, "GET", f"{FLEET}/snapshot?offset={offset}&limit={_PAGE}")["members"]
        if not page:
            break
        found["members"] += page
    return found


def _named(members: list[Any], name: str) -> Any:
    found = [m for m in members if name.rstrip("/") in (m["name"], m["id"], m["url"])]
    if len(found) != 1:
        names = ", ".join(sorted(str(each["name"]) for each in members)[:20])
        _fail(f"{len(found)} members are called {name!r}; there are: {names or 'none'}")
    return found[0]


def _show(found: Any) -> None:
    console, fleet = Console(), found["fleet"]
    table = Table(box=None, pad_edge=False)
    # A name that is cut or in two lines could not be copied into the next command.
    table.add_column("member", no_wrap=True)
    for column in ("state", "lane", "nonces/s", "processed", "outbox", "seen"):
        table.add_column(column, overflow="fold")
    for each in found["members"]:
        table.add_row(
            Text(each["name"]),
            Text(each["state"], _COLOURS.get(each["state"], "yellow")),
            "" if each["lane"] is None else str(each["lane"]),
            f"{each['nonces_per_second']:.1f}",
            str(each["processed"]),
            "" if each["outbox_age_s"] is None else f"{each['outbox_age_s']:.0f} s",
            "" if each["seen_s"] is None else f"{each['seen_s']:.0f} s ago",
        )
    console.print(table)
    for each in found["members"]:
        if each["reason"]:
            console.print(Text(f"{each['name']}: {each['reason']}"))
    lanes = f"lanes {fleet['lanes_used']} of {fleet['lanes']}" if fleet["lanes"] else "no round"
    rate = f"{fleet['processed']} nonces, {fleet['nonces_per_second']:.1f}/s"
    console.print(f"{fleet['state']}: {lanes}, {rate}", highlight=False)


def _fail(reason: str) -> Any:
    typer.echo(reason, err=True)
    raise typer.Exit(FAILED)
