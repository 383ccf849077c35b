"""``proofserve fleet serve`` as a process."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def controller(folder: Path, url: str, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A controller at ``url`` that keeps its database and its log in ``folder``."""
    database = folder / "fleet.sqlite"
    port = url.rpartition(":")[2]
    argv = ["fleet", "serve", "--port", port, "--database", str(database), *options]
    command = [sys.executable, "-c", "from proofserve.cli.main import app; app()", *argv]
    with (folder / "fleet.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
