"""The outbox commands of an operator, with and without a running server."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from outbox import writer
from outbox.support import a_spec, artifacts
from outbox.test_quarantine import head, middle, tail
from proofserve.outbox.store import SqliteOutbox

from .outbox_files import COMMANDS, OTHER, counts, files_of, lines, run, status_json


@contextmanager
def live_writer(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that holds the outbox open and stores one batch after the other."""
    command = [sys.executable, str(Path(writer.__file__)), str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def test_status_counts_by_target_and_shows_no_secret(path: Path) -> None:
    read = status_json(run("status", "--json", "--outbox", path))
    assert (read["schema_version"], read["rounds"], read["results"]) == (6, 3, 13)
    assert read["uncut_rounds"] == 1
    assert read["bytes"] == path.stat().st_size
    hook, other = read["targets"]
    assert (hook["origin"], other["origin"]) == ("http://hook:9000", OTHER)
    assert counts(path) == {"http://hook:9000": (1, 1, 1, 2), OTHER: (1, 0, 0, 0)}
    assert hook["last_error"] == "HTTP 503"
    assert 0 < hook["next_attempt_s"] <= 20
    assert other["next_attempt_s"] == 0
    assert 0 <= other["oldest_pending_s"] <= hook["oldest_pending_s"] < 60
    rounds = [(one["round_id"], one["open"], one["results"]) for one in read["newest_rounds"]]
    assert rounds == [("second", True, 4), ("d1", False, 3), ("first", False, 6)]
    table = run("status", "--outbox", path)
    assert table.exit_code == 0, table.output
    for shown in ("http://hook:9000 ", "HTTP 503", "next in", "13 results of 3", "distance-v1"):
        assert shown in table.output
    for text in (table.output, json.dumps(read)):
        assert not [secret for secret in ("user", "s3cret", "t0ken", "key") if secret in text]


def test_prune_deletes_what_was_delivered_and_nothing_else(path: Path) -> None:
    young = run("prune", "--outbox", path)
    assert "deleted 0 results, 0 delivered callbacks and 0 rounds" in young.stdout
    before = counts(path)
    time.sleep(0.01)
    done = run("prune", "--older-than-days", "0", "--outbox", path)
    assert done.exit_code == 0, done.output
    # The two delivered results of "first" with their callback, and "d1", which had no URL.
    assert done.stdout == "deleted 5 results, 1 delivered callbacks and 1 rounds\n"
    pending, failing, delivered, expired = before["http://hook:9000"]
    assert counts(path)["http://hook:9000"] == (pending, failing, delivered - 1, expired)
    assert [row["nonce"] for row in lines(run("export", "--outbox", path))] == list(range(2, 10))
    assert (
        "5 more results were delivered and then deleted" in run("status", "--outbox", path).output
    )


def test_prune_beside_a_server(path: Path) -> None:
    with live_writer(path) as child:
        assert child.stdout is not None
        child.stdout.readline()
        done = run("prune", "--older-than-days", "0", "--outbox", path)
        assert done.exit_code == 0, done.output
        assert "deleted 5 results" in done.stdout
        # The server continues to store.
        assert child.stdout.readline()
        assert child.poll() is None


def test_the_commands_read_the_outbox_of_the_servers_settings(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POC_OUTBOX", str(path))
    assert status_json(run("status", "--json"))["rounds"] == 3
    monkeypatch.setenv("POC_OUTBOX", "")
    monkeypatch.chdir(path.parent)
    path.rename("proofserve-outbox.sqlite")
    assert status_json(run("status", "--json"))["rounds"] == 3


def test_reading_leaves_the_folder_as_it_was(path: Path) -> None:
    before = files_of(path)
    for command in (("status",), ("export",), ("export", "--round", "first", "--for-verify")):
        assert run(*command, "--outbox", path).exit_code == 0
    assert files_of(path) == before


@pytest.mark.parametrize(
    ("options", "pending", "revived", "after"),
    [
        ((), 2, 0, {"http://hook:9000": (1, 0, 1, 2), OTHER: (1, 0, 0, 0)}),
        (("--expired",), 2, 2, {"http://hook:9000": (3, 0, 1, 0), OTHER: (1, 0, 0, 0)}),
        (
            ("--expired", "--target", "http://HOOK:9000/x"),
            1,
            2,
            {"http://hook:9000": (3, 0, 1, 0), OTHER: (1, 0, 0, 0)},
        ),
        (
            ("--expired", "--round", "first"),
            0,
            2,
            {"http://hook:9000": (3, 1, 1, 0), OTHER: (1, 0, 0, 0)},
        ),
        (
            ("--target", "https://other:443"),
            1,
            0,
            {"http://hook:9000": (1, 1, 1, 2), OTHER: (1, 0, 0, 0)},
        ),
        (
            ("--expired", "--round", "d1"),
            0,
            0,
            {"http://hook:9000": (1, 1, 1, 2), OTHER: (1, 0, 0, 0)},
        ),
    ],
)
def test_retry_makes_the_chosen_callbacks_due(
    path: Path, options: tuple[str, ...], pending: int, revived: int, after: Any
) -> None:
    result = run("retry", *options, "--outbox", path)
    assert result.exit_code == 0, result.output
    total = pending + revived
    assert result.stdout == f"{total} callbacks are due now, {revived} had expired\n"
    assert counts(path) == after
    assert sorted(files_of(path)) == [path.name, f"{path.name}.lock"]


def test_a_retried_callback_has_all_its_attempts_and_its_old_key(path: Path) -> None:
    def rows() -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(path)) as file:
            return file.execute(
                "SELECT state, attempts, revived, next_attempt_at > failed_at + 10,"
                " idempotency_key, sequence, first_seq, last_seq"
                " FROM deliveries WHERE failed_at IS NOT NULL ORDER BY id"
            ).fetchall()

    before = rows()
    assert [row[:4] for row in before] == [
        ("expired", 1, 0, 0),
        ("expired", 1, 0, 0),
        ("pending", 1, 0, 1),
    ]
    assert run("retry", "--expired", "--outbox", path).exit_code == 0
    again = rows()
    assert [row[:4] for row in again] == [
        ("pending", 0, 1, 0),
        ("pending", 0, 1, 0),
        ("pending", 0, 0, 0),
    ]
    assert [row[4:] for row in again] == [row[4:] for row in before]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_works_beside_a_server_that_stores(
    path: Path, command: tuple[str, ...]
) -> None:
    with live_writer(path) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        for _ in range(20):
            assert server.stdout.readline()
        result = run(*command, "--outbox", path)
        assert result.exit_code == 0, result.output
        stored = int(server.stdout.readline())
        for _ in range(20):
            assert int(server.stdout.readline()) > stored
        assert server.poll() is None
    assert not [name for name in files_of(path) if "damaged" in name]
    if command == ("export",):
        assert [row["seq"] for row in lines(result)] == list(range(1, len(lines(result)) + 1))
        assert len(lines(result)) > 13
    if "--expired" in command:
        assert "4 callbacks are due now, 2 had expired" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("corrupt", [head, middle, tail])
def test_a_command_reports_a_damaged_file_and_does_not_change_it(
    tmp_path: Path, corrupt: Callable[[bytes], bytes], command: tuple[str, ...]
) -> None:
    path = tmp_path / "outbox.sqlite"

    async def fill() -> None:
        async with await SqliteOutbox.open(path) as store:
            await store.open_round(a_spec(url=OTHER))
            await store.record("r1", 2000, artifacts(*range(4000)), {})

    asyncio.run(fill())
    path.write_bytes(corrupt(path.read_bytes()))
    before = files_of(path)
    result = run(*command, "--outbox", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"the outbox {path} is damaged" in result.stderr
    assert "was not changed" in result.stderr
    assert files_of(path) == before


def _version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA user_version = {version}")


def _letter(path: Path) -> None:
    path.write_text("a letter to a friend " * 500)


def _recipes(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE recipes (name)")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (Path.unlink, "there is no outbox"),
        (lambda path: path.write_bytes(b""), "is empty: no server has used it yet"),
        (lambda path: _version(path, 7), "has version 7, this proofserve reads up to 6"),
        (lambda path: _version(path, 2), "has version 2, this proofserve reads 6"),
        (_recipes, "is a database of another program"),
        (_letter, "file is not a database"),
    ],
    ids=["missing", "empty", "newer", "older", "of something else", "no database"],
)
def test_a_file_that_is_not_an_outbox_is_refused_and_not_changed(
    path: Path, change: Callable[[Path], object], complaint: str, command: tuple[str, ...]
) -> None:
    change(path)
    before = files_of(path)
    result = run(*command, "--outbox", path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert complaint in " ".join(result.stderr.split())
    assert files_of(path) == before


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (("retry", "--target", "http://unknown"), "targets of the outbox: http://hook:9000, https"),
        (("retry", "--target", "hook"), "--target"),
        (("retry", "--round", "r9"), "no round 'r9' in the outbox: `proofserve outbox status`"),
        (("export", "--round", "r9"), "no round 'r9' in the outbox"),
        (("export", "--round", "r9", "--for-verify"), "no round 'r9' in the outbox"),
        (("export", "--round", "d1", "--for-verify"), "'d1' is of the distance protocol"),
        (("export", "--for-verify"), "needs --round"),
        (("export", "--after", "-1"), "--after"),
        (("export", "--output", "{outbox}"), "File exists"),
        (("export", "--round", "r9", "--output", "{outbox}.new"), "no round 'r9'"),
    ],
)
def test_invalid_options_are_refused_and_change_nothing(
    path: Path, args: tuple[str, ...], complaint: str
) -> None:
    before = files_of(path)
    result = run(*(arg.format(outbox=path) for arg in args), "--outbox", path)
    assert result.exit_code == 2
    assert complaint in " ".join(result.stderr.split())
    assert files_of(path) == before
