"""A real disk fills up under a node of its own process, which proves with a fake engine."""

from pathlib import Path
from typing import Any

from api.support import ORDER
from support.pace import wait_until
from support.small_disk import fill, mounted
from wiring.api_processes import processed, served


def test_a_full_disk_pauses_the_round_and_nothing_is_lost(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk, served(tmp_path, 1, outbox=disk) as (node,):

        def paused() -> str | None:
            reason: str | None = node.ask("GET", "/status")["paused_reason"]
            return reason

        node.ask("POST", "/init/generate", json=ORDER)
        wait_until(lambda: processed(node) >= 16)
        fill(disk / "ballast")
        wait_until(paused)
        assert "disk" in (paused() or "")
        stored = processed(node)
        assert node.ask("GET", "/health/live")["status"] == "ok"
        (disk / "ballast").unlink()
        wait_until(lambda: processed(node) > stored)
        wait_until(lambda: paused() is None)
        node.ask("POST", "/stop")
        rows: list[Any] = []
        after = 0
        while page := node.ask("GET", f"/results?after={after}&limit=1000")["results"]:
            rows += page
            after = page[-1]["seq"]
        assert len(rows) == processed(node)
        # The lane of node 1 of 3.
        assert [row["nonce"] for row in rows] == [1 + 3 * index for index in range(len(rows))]
