"""``proofserve outbox export``: the results of an outbox file."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from outbox.support import a_spec, artifacts, winners
from proofserve.cli.main import app
from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from support.stub_node import stub_node

from .outbox_files import lines, run


def test_export_writes_every_result_with_the_field_names_of_the_api(
    path: Path, tmp_path: Path
) -> None:
    everything = lines(run("export", "--outbox", path))
    assert [row["seq"] for row in everything] == list(range(1, 14))
    assert everything[0] == {"seq": 1, "round_id": "first", "nonce": 0, "vector_b64": "vector0"}
    (winner,) = winners(3)
    assert everything[6] == {"seq": 7, "round_id": "d1", "nonce": 3, "dist": winner.distance}
    failed = {"seq": 9, "round_id": "d1", "nonce": 11, "error": "not finite"}
    assert everything[8] == failed
    part = run("export", "--outbox", path, "--after", "8", "--round", "d1")
    assert lines(part) == [failed]
    assert part.stderr == "1 results; continue later with --after 9\n"
    assert [row["seq"] for row in lines(run("export", "--outbox", path, "--round", "second"))] == [
        *range(10, 14)
    ]
    file = tmp_path / "results.jsonl"
    written = run("export", "--outbox", path, "--output", file)
    assert (written.exit_code, written.stdout) == (0, "")
    assert [json.loads(line) for line in file.read_text().splitlines()] == everything


def test_a_round_of_many_pages_is_exported_whole(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"

    async def fill() -> None:
        async with await SqliteOutbox.open(path) as store:
            for name in ("r1", "r2", "r1"):
                done = (await store.open_round(a_spec(name))).next_index
                await store.record(name, done + 5000, artifacts(*range(done, done + 5000)), {})

    asyncio.run(fill())
    for command in (("--round", "r1"), ("--round", "r1", "--after", "4999")):
        rows = lines(run("export", "--outbox", path, *command))
        first = 4999 if "--after" in command else 0
        assert [row["nonce"] for row in rows] == list(range(first, 10_000))
    assert len(lines(run("export", "--outbox", path))) == 15_000


def test_verify_reads_what_export_writes(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"

    async def fill(node: NodeClient) -> None:
        work = Work("stub", seq_len=256)
        claims = node.artifacts(work, range(12))
        spec = a_spec("honest")
        block = Block(work.block_hash, work.block_height)
        order = replace(spec.work, block=block, public_key=work.public_key)
        async with await SqliteOutbox.open(path) as store:
            lane = NonceLane(0, 1)
            await store.open_round(replace(spec, work=order, lane=lane))
            await store.record("honest", 12, claims, {})
            # The same vectors under another key, with one missing.
            await store.open_round(replace(a_spec("forged"), lane=lane))
            await store.record("forged", 13, claims, {12: "not finite"})

    def verified(round_id: str, url: str) -> Result:
        document = tmp_path / f"{round_id}.json"
        chosen = ("--round", round_id, "--for-verify", "--output", document)
        assert run("export", "--outbox", path, *chosen).exit_code == 0
        # The stub gives the same bits each time: no rounding is between its vectors.
        options = (
            "--recompute-url",
            url,
            "--dist-threshold",
            "0.001",
            "--fixed",
            "--test",
            "count",
        )
        return CliRunner().invoke(app, ["verify", str(document), *options])

    with stub_node() as (_, url), NodeClient(url) as node:
        asyncio.run(fill(node))
        honest, forged = verified("honest", url), verified("forged", url)
    assert "12 of 12 nonces recomputed" in honest.output
    assert "count     undecided: 0 mismatches" in honest.output
    assert "count     fraud: 13 mismatches" in forged.output
    assert forged.exit_code == 1, forged.output


def test_the_export_ends_when_its_reader_closes_the_pipe(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"

    async def fill() -> None:
        async with await SqliteOutbox.open(path) as store:
            await store.open_round(a_spec())
            await store.record("r1", 1, artifacts(*range(5000)), {})

    asyncio.run(fill())
    command = [sys.executable, "-m", "proofserve", "outbox", "export", "--outbox", str(path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert json.loads(child.stdout.readline())["nonce"] == 0
        child.stdout.close()
        assert "Traceback" not in child.stderr.read()
        assert child.wait() != 0
