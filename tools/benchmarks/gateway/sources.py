"""The sources of contestants: this checkout, the system, or the package index."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.gateway.errors import Skipped

# Seconds: LiteLLM brings more than a hundred packages.
INSTALL_LIMIT_S = 900.0
# Distributions install servers here, and many users do not have these folders on their PATH.
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")


class Source(Protocol):
    """Finds a program, or makes it available."""

    def program(self, cache: Path) -> Path:
        """The path of the program, which may be installed below ``cache``. Raises Skipped."""


@dataclass(frozen=True, slots=True)
class Ours:
    """A program of the environment that runs this benchmark."""

    name: str

    def program(self, cache: Path) -> Path:  # noqa: ARG002 - nothing is installed
        """The program beside this Python."""
        found = Path(sys.executable).with_name(self.name)
        if not found.exists():
            raise Skipped(f"{found} does not exist: make setup")
        return found


@dataclass(frozen=True, slots=True)
class System:
    """A program that the distribution provides."""

    name: str

    def program(self, cache: Path) -> Path:  # noqa: ARG002 - nothing is installed
        """The program on the path."""
        for folders in (None, ":".join(SYSTEM_FOLDERS)):
            if found := shutil.which(self.name, path=folders):
                return Path(found)
        raise Skipped(f"not installed: apt install {self.name}")


@dataclass(frozen=True, slots=True)
class Index:
    """Packages of the index, installed once into their own environment.

    ``requirements`` are what pip takes, separated by blanks.
    """

    requirements: str
    name: str
    folder: str | None = None

    def program(self, cache: Path) -> Path:
        """The program in its environment, which is created if it does not exist."""
        home = cache / (self.folder or self.name)
        # The stamp names the requirements, so that a changed version is installed again.
        stamp = home / "installed.txt"
        if not stamp.exists() or stamp.read_text() != self.requirements:
            shutil.rmtree(home, ignore_errors=True)
            self._install(home)
            stamp.write_text(self.requirements)
        return home / "bin" / self.name

    def _install(self, home: Path) -> None:
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *self.requirements.split()])


def _run(argv: list[str]) -> None:
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Skipped(f"not installed within {INSTALL_LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else error.stderr[-200:]
        raise Skipped(f"does not install: {why}") from None
