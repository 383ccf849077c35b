"""A full disk: what the node does, and what its text says."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.node import serve, until

pytestmark = pytest.mark.engine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("mounting a small file system needs rights that this user does not have")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


def test_a_full_disk_pauses_the_round_and_nothing_else(
    tiny: Path, tmp_path: Path, small_disk: Path
) -> None:
    ballast = small_disk / "ballast"
    with serve(tiny, tmp_path, POC_OUTBOX=str(small_disk / "outbox.sqlite")) as node:
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


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
