"""``proofserve fleet verdicts`` and ``fleet verify``."""

import json as json_format
from datetime import UTC, datetime
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

_COLOURS = {"honest": "green", "fraud": "bold red", "abstained": "dim"}


def verdicts(
    member: Annotated[str | None, typer.Argument(help="Only of the member NAME.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many, the newest first.")] = 50,
    json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Show verdicts about members, the newest first.

    \b
    proofserve fleet verdicts
    proofserve fleet verdicts node-7 --limit 5 --json
    """
    with fleet_client(url, api_key) as client:
        about = ""
        if member is not None:
            about = f"&member={named(all_members(client)['members'], member)['id']}"
        found = call(client, "GET", f"{FLEET}/verdicts?limit={limit}{about}")
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    _show(found["verdicts"])


def verify(member: MemberName, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Have a worker verify now what a member has stored of the running round."""
    with fleet_client(url, api_key) as client:
        found = named(all_members(client)["members"], member)
        job = call(client, "POST", f"{FLEET}/members/{found['id']}/verify")
    typer.echo(f"{found['name']}: job {job['id']} waits for a worker with {job['queue']}")


def _show(verdicts: list[Any]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("at", "member", "verdict", "test", "nonces", "distance", "threshold", "alpha"):
        table.add_column(column, overflow="fold")
    table.add_column("why", overflow="fold")
    for each in verdicts:
        at = datetime.fromtimestamp(each["at"], UTC).astimezone()
        table.add_row(
            f"{at:%Y-%m-%d %H:%M:%S}",
            Text(each["member_name"]),
            Text(each["outcome"], _COLOURS.get(each["outcome"], "yellow")),
            each["test"] or "",
            str(each["nonces"]),
            _number(each["distance"]),
            _number(each["threshold"]),
            # Null in rows of older versions.
            "" if each["alpha"] is None else f"{each['alpha']:.1e}",
            Text(each["reason"] or ""),
        )
    Console().print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
