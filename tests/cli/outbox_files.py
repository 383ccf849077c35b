"""An outbox with rows of every kind, and functions that run the outbox commands."""

import asyncio
import json
from pathlib import Path
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from outbox.support import a_distance_spec, a_spec, artifacts, winners
from proofserve.cli.main import app
from proofserve.outbox.planning import CallbackPolicy
from proofserve.outbox.store import SqliteOutbox

SECRET = "http://user:s3cret@hook:9000/t0ken?key=s3cret"  # noqa: S105 - a test value
OTHER = "https://other"
COMMANDS = [("status",), ("status", "--json"), ("retry", "--expired"), ("export",)]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["outbox", *map(str, args)])


def status_json(result: Result) -> dict[str, Any]:
    """The output of `status --json`."""
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.stdout)
    return read


def counts(path: Path) -> dict[str, tuple[int, int, int, int]]:
    """Pending, failing, delivered and expired of each target."""
    return {
        one["origin"]: (one["pending"], one["failing"], one["delivered"], one["expired"])
        for one in status_json(run("status", "--json", "--outbox", path))["targets"]
    }


def lines(result: Result) -> list[dict[str, Any]]:
    """The lines that `export` wrote."""
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def files_of(path: Path) -> dict[str, bytes]:
    """The names of the file and of the files beside it."""
    return {each.name: each.read_bytes() for each in path.parent.iterdir()}


def fill(path: Path) -> None:
    """Two rounds of the artifact protocol and one of the other. At the hook ``first`` has one
    callback delivered and two expired, ``second`` one failing. A job waits for the other target.
    """
    asyncio.run(_fill(path))


async def _fill(path: Path) -> None:
    async with await SqliteOutbox.open(path) as store:
        await store.open_round(a_spec("first", SECRET))
        await _attempt(store, "first", 0, None)
        await _attempt(store, "first", 2, "expires")
        await _attempt(store, "first", 4, "expires")
        await store.open_round(a_distance_spec("d1"))
        await store.record("d1", 32, winners(3, 7), {11: "not finite"})
        await store.open_round(a_spec("second", f"{SECRET}/2"))
        await _attempt(store, "second", 6, "waits")
        await store.enqueue("validated", OTHER, {"n_total": 1})
        await store.record("second", 9, artifacts(8), {9: "not finite"})


async def _attempt(store: SqliteOutbox, round_id: str, first: int, failure: str | None) -> None:
    """Store two results, and try once to deliver them."""
    await store.record(round_id, first, artifacts(first, first + 1), {})
    (due,) = (await store.plan(CallbackPolicy(), flushing=True)).due
    if failure is None:
        await store.acknowledge(due)
    else:
        await store.fail(due, f"HTTP 503: {SECRET}", None if failure == "expires" else 20.0)
