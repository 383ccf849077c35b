"""A full disk: what a node with a model does, and what its text says.

``tests/wiring/test_full_disk.py`` has the same with a fake engine.
"""

from pathlib import Path

import pytest

from support.node import serve, until
from support.small_disk import fill, mounted

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_full_disk_pauses_the_round_and_nothing_else(tiny: Path, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "disk") as disk,
        serve(tiny, tmp_path, POC_OUTBOX=str(disk / "outbox.sqlite")) as node,
    ):
        ballast = disk / "ballast"
        node.start_round()
        until(lambda: node.processed() >= 16)
        fill(ballast)
        until(lambda: node.status()["paused_reason"] is not None)
        assert "disk" in node.status()["paused_reason"]
        stored = node.processed()
        assert node.chat("Chat goes on.")
        ballast.unlink()
        until(lambda: node.processed() > stored)
        until(lambda: node.status()["paused_reason"] is None)
        node.stop()
        rows = node.results()
        assert len(rows) == node.processed()
        assert [row["nonce"] for row in rows] == list(range(len(rows)))
