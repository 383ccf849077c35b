"""Environments that hold the wheel of this checkout and what one of its extras asks for."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKS = [ROOT / "requirements" / name for name in ("torch.lock", "cpu.lock")]
INSTALL_S = 1500
EXTRA = "reference"


class Environment:
    """A virtual environment of its own, without the packages of this one."""

    def __init__(self, folder: Path, with_pip: bool) -> None:
        venv.create(folder, with_pip=with_pip)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        # Models here are so small that threads would only wait for each other.
        self._env = {**inherited, "OMP_NUM_THREADS": "1"}

    def run(self, *argv: object, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        """What became of ``python`` with these arguments."""
        return subprocess.run(
            [str(self.python), *map(str, argv)],
            env=self._env,
            cwd=self.site,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def build_wheel(folder: Path) -> Path:
    """The wheel, built from a copy: setuptools would pack what earlier builds left behind."""
    copy = folder / "checkout"
    shutil.copytree(
        ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def downloaded(folder: Path, wheel: Path) -> Environment:
    """As a validator gets it: by pip. Minutes."""
    made = Environment(folder, with_pip=True)
    pins = folder / "pins.txt"
    pins.write_text("\n".join(_pins()))
    wanted = ("--constraint", pins, f"{wheel}[{EXTRA}]")
    done = made.run("-m", "pip", "install", *wanted, timeout=INSTALL_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def _pins() -> list[str]:
    """The versions of the locks. With their hashes, pip would ask for one of the wheel as well."""
    lines = [line for lock in LOCKS for line in lock.read_text().splitlines()]
    return [line.removesuffix(" \\") for line in lines if re.match(r"[\w.-]+==", line)]


def linked(folder: Path, wheel: Path, extra: str = EXTRA) -> Environment:
    """The same in a second: the wheel, and links to those packages that its metadata asks for."""
    made = Environment(folder, with_pip=False)
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(made.site)
    (info,) = made.site.glob("*.dist-info")
    for needed in _closure(metadata.Distribution.at(info), {extra}, set()):
        for name in {file.parts[0] for file in needed.files or ()} - {"..", "__pycache__"}:
            link = made.site / name
            if not link.is_symlink():
                link.symlink_to(Path(str(needed.locate_file(name))))
    return made


def _closure(
    wanted: metadata.Distribution, extras: set[str], seen: set[str]
) -> Iterator[metadata.Distribution]:
    for text in wanted.requires or ():
        need = Requirement(text)
        applies = (
            any(need.marker.evaluate({"extra": e}) for e in extras | {""}) if need.marker else True
        )
        key = f"{need.name}[{','.join(sorted(need.extras))}]"
        if applies and key not in seen:
            seen.add(key)
            found = metadata.distribution(need.name)
            yield found
            yield from _closure(found, need.extras, seen)
