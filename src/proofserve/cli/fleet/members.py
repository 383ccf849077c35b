"""``proofserve fleet members`` and the commands that cordon, drain and remove one."""

import json as json_format
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proofserve.cli.fleet.fleet_client import (
    DEFAULT_URL,
    ApiKey,
    MemberName,
    Url,
    all_members,
    call,
    fleet_client,
    named,
)
from proofserve.wire.paths import FLEET

Reason = Annotated[str, typer.Option(help="Shown to other operators beside the member.")]
_COLOURS = {"ready": "green", "lost": "red", "refused": "red"}


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
    with fleet_client(url, api_key) as client:
        found = all_members(client)
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
    with fleet_client(url, api_key) as client:
        found = named(all_members(client)["members"], member)
        body = None if reason is None else {"reason": reason}
        answer = call(client, "POST", f"{FLEET}/members/{found['id']}/{what}", body)
    state = answer.get("state", "removed")
    typer.echo(f"{found['name']}: {state}" + (f" ({reason})" if reason else ""))


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
