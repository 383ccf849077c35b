"""The programs of a run: gateways of this checkout, the system or the index, and two of our own.

The mock backend and the load generator are C, so that neither is the limit.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Seconds: LiteLLM brings more than a hundred packages.
INSTALL_LIMIT_S = 900.0
# Distributions install servers here, and many users do not have these folders on their PATH.
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
SOURCES = Path(__file__).with_name("native")
SHARED = ("http.c", "net.c")
PROGRAMS = {
    "mock": ("mock.c", *SHARED),
    "load": ("load.c", "exchange.c", "options.c", "marks.c", "samples.c", *SHARED),
}
OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-Wextra")


class Unusable(RuntimeError):
    """Nothing can be measured on this machine: the text says what is missing or wrong."""


class Skipped(RuntimeError):
    """One contestant cannot run: the text says why. The others still run."""


# Finds a program, or makes it available below a folder; raises Skipped.
Source = Callable[[Path], Path]


def ours(name: str, _cache: Path) -> Path:
    """A program of the environment that runs this benchmark."""
    found = Path(sys.executable).with_name(name)
    if not found.exists():
        raise Skipped(f"{found} does not exist: make setup")
    return found


def of_system(name: str, _cache: Path) -> Path:
    """A program that the distribution provides."""
    for folders in (None, ":".join(SYSTEM_FOLDERS)):
        if found := shutil.which(name, path=folders):
            return Path(found)
    raise Skipped(f"not installed: apt install {name}")


def of_index(requirements: str, name: str, cache: Path, folder: str | None = None) -> Path:
    """Packages of the index, installed once into their own environment: what pip takes."""
    home = cache / (folder or name)
    # The stamp names the requirements, so that a changed version is installed again.
    stamp = home / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements:
        shutil.rmtree(home, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "--quiet", *requirements.split()])
        stamp.write_text(requirements)
    return home / "bin" / name


def _run(argv: list[str]) -> None:
    try:
        subprocess.run(argv, check=True, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Skipped(f"not installed within {INSTALL_LIMIT_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1] if lines else error.stderr[-200:]
        raise Skipped(f"does not install: {why}") from None


def build(folder: Path) -> tuple[Path, Path]:
    """The mock backend and the load generator, compiled into ``folder`` if their sources changed.

    Raises Unusable.
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
    return folder / "mock", folder / "load"


def _compile(compiler: str, sources: list[Path], program: Path) -> None:
    argv = [compiler, *OPTIONS, "-o", str(program), *map(str, sources), "-lm"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{program.name} does not compile:\n{done.stderr}")
