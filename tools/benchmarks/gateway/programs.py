"""Builds the mock backend and the load generator, which are C so that neither is the limit."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gateway.errors import Unusable

SOURCES = Path(__file__).with_name("native")
SHARED = ("http.c", "net.c")
PROGRAMS = {
    "mock": ("mock.c", *SHARED),
    "load": ("load.c", "exchange.c", "options.c", "marks.c", "samples.c", *SHARED),
}
OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")


@dataclass(frozen=True, slots=True)
class Programs:
    """The paths of the two programs."""

    mock: Path
    load: Path


def build(folder: Path) -> Programs:
    """Compile each program that is older than its sources into ``folder``.

    Raises:
        Unusable: there is no C compiler, or it refused the sources.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unusable("a C compiler is needed for the load generator: apt install gcc libc6-dev")
    folder.mkdir(parents=True, exist_ok=True)
    newest = max(file.stat().st_mtime for file in SOURCES.iterdir())
    for name, sources in PROGRAMS.items():
        program = folder / name
        if not program.exists() or program.stat().st_mtime < newest:
            _compile(compiler, [SOURCES / source for source in sources], program)
    return Programs(mock=folder / "mock", load=folder / "load")


def _compile(compiler: str, sources: list[Path], program: Path) -> None:
    argv = [compiler, *OPTIONS, "-o", str(program), *map(str, sources), "-lm"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{program.name} does not compile:\n{done.stderr}")
