"""``proofserve fleet``: the controller of a fleet, its workers, and what operators ask of it."""

import asyncio
import json as json_format
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from proofserve.cli.command import SettingOptions, first_key
from proofserve.cli.servers import DemoDtype
from proofserve.host import quick_dtype
from proofserve.remote.http import JsonClient
from proofserve.reports import NodeError, ReportedError
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.fleet import FleetSettings, FleetWorkerSettings
from proofserve.wire import FLEET

FLEET_OPTIONS = SettingOptions(FleetSettings)
WORKER_OPTIONS = SettingOptions(FleetWorkerSettings)
# The exit code of a command that failed, and of a process that did not start.
FAILED = 2
DEFAULT_URL = "http://127.0.0.1:7100"
_TIMEOUT_S = 10.0
_PAGE = 500
# One line for each callback would be too many.
_ONLY_WARNINGS = ("httpx",)
_STATE_COLOURS = {"ready": "green", "lost": "red", "refused": "red"}
_VERDICT_COLOURS = {
    "honest": "green",
    "fraud": "bold red",
    "unproved": "yellow",
    "abstained": "dim",
}

Url = Annotated[str, typer.Option("--url", envvar="FLEET_URL", help="The fleet: http://HOST:PORT.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="FLEET_API_KEY", callback=first_key, help="A key of the fleet, if it needs one."
    ),
]
MemberName = Annotated[str, typer.Argument(help="Name, id or URL of the member.")]
Reason = Annotated[str, typer.Option(help="Shown to other operators beside the member.")]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]

# Without rich's frames, narrow terminals show the names of variables in full.
app = typer.Typer(
    help="Many servers that look like one node: the controller, and its members.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


def serve(**given: Any) -> None:
    """Answer as one node for many: rounds, jobs and results of all members.

    \b
    proofserve fleet serve --member http://a:8000 --member http://b:8000
    proofserve fleet serve --dns http://nodes.default.svc:8000 --public-url http://fleet:7100 \\
      --database postgresql://fleet@db/fleet --host 0.0.0.0

    A network uses http://HOST:PORT/api/v1/pow as it would use a node's. Members must be able
    to reach --public-url, and must allow it (their --poc-callback-allow). After SIGTERM rounds
    go on at the members; the next start, or another controller, takes them over.
    """
    # Only the controller needs these libraries; `fleet members` works without.
    with _extras("fleet"):
        from proofserve.wiring.fleet import run_fleet  # noqa: PLC0415
    chosen = FLEET_OPTIONS.chosen(given)
    with _logged_start("serve"):
        run_fleet(chosen)


def worker(**given: Any) -> None:
    """Verify members: take jobs from the fleet's database, recompute, and store verdicts.

    \b
    proofserve fleet worker --model ./model
    proofserve fleet worker --database postgresql://fleet@db/fleet --model ./model --device cuda

    A worker takes the jobs of members that serve the weights in --model, and those of
    policies by which members judge each other, for which it needs none. Start as many
    as needed: each job goes to one of them. After SIGTERM a worker takes no more jobs; one that
    it had begun goes to another worker.
    """
    with _extras("fleet,reference"):
        from proofserve.fleet.verification import MEMBERS_QUEUE  # noqa: PLC0415
        from proofserve.wiring.fleet_worker import checker_of, run_worker, worker_checkpoints  # noqa: PLC0415
    chosen = WORKER_OPTIONS.chosen(given)
    with _logged_start("worker"):
        found = worker_checkpoints(chosen)
        checker = checker_of(chosen, found)
        asyncio.run(run_worker(chosen, (*found, MEMBERS_QUEUE), checker))


app.command("serve")(FLEET_OPTIONS.given_to(serve))
app.command("worker")(WORKER_OPTIONS.given_to(worker))


@app.command()
def members(url: Url = DEFAULT_URL, api_key: ApiKey = None, json: AsJson = False) -> None:
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
    console, fleet = Console(), found["fleet"]
    others = ("state", "lane", "nonces/s", "processed", "outbox", "seen")
    # A name that is cut or in two lines could not be copied into the next command.
    columns = Column("member", no_wrap=True), *(Column(name, overflow="fold") for name in others)
    table = Table(*columns, box=None, pad_edge=False)
    for each in found["members"]:
        table.add_row(
            Text(each["name"]),
            Text(each["state"], _STATE_COLOURS.get(each["state"], "yellow")),
            _shown("{}", each["lane"]),
            _shown("{:.1f}", each["nonces_per_second"]),
            _shown("{}", each["processed"]),
            _shown("{:.0f} s", each["outbox_age_s"]),
            _shown("{:.0f} s ago", each["seen_s"]),
        )
    console.print(table)
    for each in found["members"]:
        if each["reason"]:
            console.print(Text(f"{each['name']}: {each['reason']}"))
    lanes = f"lanes {fleet['lanes_used']} of {fleet['lanes']}" if fleet["lanes"] else "no round"
    rate = f"{fleet['processed']} nonces, {fleet['nonces_per_second']:.1f}/s"
    console.print(f"{fleet['state']}: {lanes}, {rate}", highlight=False)


@app.command()
def cordon(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Give a member nothing new; its lane of the running round goes on."""
    _change("cordon", member, reason, url, api_key)


@app.command()
def uncordon(member: MemberName, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let a cordoned or drained member take part again."""
    _change("uncordon", member, None, url, api_key)


@app.command()
def drain(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Stop a member's lane, and give it nothing new; what it has proved is still delivered."""
    _change("drain", member, reason, url, api_key)


@app.command()
def remove(
    member: MemberName, reason: Reason, url: Url = DEFAULT_URL, api_key: ApiKey = None
) -> None:
    """Forget a member that joined by itself. Its results stay; it may join again."""
    _change("remove", member, reason, url, api_key)


@app.command()
def demo(
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep the fleet and its page until Ctrl-C.")
    ] = False,
    dtype: DemoDtype = None,
) -> None:
    """Run a fleet of real servers: kill one, replace it, and have members find one that cheats.

    A controller on SQLite, a worker without weights, and five vLLM servers of a small trained
    model, of which four run at a time. Needs no network, no GPU and no settings, and leaves no
    process running.
    """
    # It stands above this package, and a controller needs none of it.
    import_module("proofserve_lab.fleet_demo").demo(stay, dtype or quick_dtype())


@app.command()
def verdicts(
    member: Annotated[str | None, typer.Argument(help="Only of the member NAME.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many, the newest first.")] = 50,
    json: AsJson = False,
) -> None:
    """Show verdicts about members, the newest first.

    \b
    proofserve fleet verdicts
    proofserve fleet verdicts node-7 --limit 5 --json
    """
    with _client(url, api_key) as client:
        about = "" if member is None else f"&member={_member(client, member)['id']}"
        found = _call(client, "GET", f"{FLEET}/verdicts?limit={limit}{about}", listed="verdicts")
    if json:
        typer.echo(json_format.dumps(found, indent=2))
        return
    names = ("at", "member", "verdict", "test", "nonces", "distance", "threshold", "alpha", "why")
    columns = (Column(name, overflow="fold") for name in names)
    table = Table(*columns, box=None, pad_edge=False)
    for each in found["verdicts"]:
        at = datetime.fromtimestamp(each["at"], UTC).astimezone()
        table.add_row(
            f"{at:%Y-%m-%d %H:%M:%S}",
            Text(each["member_name"]),
            Text(each["outcome"], _VERDICT_COLOURS.get(each["outcome"], "yellow")),
            each["test"] or "",
            str(each["nonces"]),
            _shown("{:.4f}", each["distance"]),
            _shown("{:.4f}", each["threshold"]),
            # Null in rows of older versions.
            _shown("{:.1e}", each["alpha"]),
            Text(each["reason"] or ""),
        )
    Console().print(table)


@app.command()
def verify(member: MemberName, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Have a worker verify now what a member has stored of the running round."""
    with _client(url, api_key) as client:
        found = _member(client, member)
        job = _call(client, "POST", f"{FLEET}/members/{found['id']}/verify")
    typer.echo(f"{found['name']}: job {job['id']} waits for a worker with {job['queue']}")


@contextmanager
def _extras(names: str) -> Iterator[None]:
    """End the command if an import within finds that these extras are not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        _fail(f"{error.name} is not installed: pip install 'proofserve[{names}]'")


@contextmanager
def _logged_start(command: str) -> Iterator[None]:
    """Write lines of this process to stderr, and end it if it cannot start."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield
    except (ValueError, OSError, OutboxUnavailable) as error:
        _fail(f"proofserve fleet {command}: {error}")


def _shown(form: str, value: float | None) -> str:
    return "" if value is None else form.format(value)


def _fail(reason: str) -> NoReturn:
    typer.echo(reason, err=True)
    raise typer.Exit(FAILED)


def _client(url: str, api_key: str | None) -> JsonClient:
    try:
        return JsonClient(url, api_key, _TIMEOUT_S)
    except ReportedError as error:
        _fail(str(error))


def _call(
    client: JsonClient, method: str, path: str, body: Any = None, listed: str | None = None
) -> Any:
    """The object that the fleet answers, with the list ``listed``; ends the command without it."""
    try:
        found = client.ask(method, path, body)
    except NodeError as error:
        _fail(str(error))
    if listed and not isinstance(found.get(listed), list):
        _fail(f"{client.url} does not answer as a fleet: it names no {listed}")
    return found


def _all_members(client: JsonClient) -> Any:
    """The snapshot of the fleet with the members of all its pages."""
    found = _call(client, "GET", f"{FLEET}/snapshot?limit={_PAGE}", listed="members")
    while len(found["members"]) < found["of_members"]:
        offset = len(found["members"])
        page = _call(client, "GET", f"{FLEET}/snapshot?offset={offset}&limit={_PAGE}")["members"]
        if not page:
            break
        found["members"] += page
    return found


def _member(client: JsonClient, name: str) -> Any:
    members = _all_members(client)["members"]
    found = [m for m in members if name.rstrip("/") in (m["name"], m["id"], m["url"])]
    if len(found) != 1:
        names = ", ".join(sorted(str(each["name"]) for each in members)[:20])
        _fail(f"{len(found)} members are called {name!r}; there are: {names or 'none'}")
    return found[0]


def _change(what: str, member: str, reason: str | None, url: str, api_key: str | None) -> None:
    with _client(url, api_key) as client:
        found = _member(client, member)
        body = None if reason is None else {"reason": reason}
        answer = _call(client, "POST", f"{FLEET}/members/{found['id']}/{what}", body)
    state = answer.get("state", "removed")
    typer.echo(f"{found['name']}: {state}" + (f" ({reason})" if reason else ""))
