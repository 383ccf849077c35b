"""Installs the CPU build of vLLM, proofserve and its tools into .venv, by the lock files.

    python3 scripts/setup.py [FOLDER]      FOLDER is the environment, .venv unless given

uv installs from the same indexes as pip, several times faster. Where no index has uv, or uv fails,
pip installs. Details go to FOLDER/setup.log. This file needs nothing but Python itself.
"""

import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = Path("requirements")
OLDEST = (3, 11)
# Lines of the log that an error shows.
SHOWN = 12
# Seconds between two dots of progress.
DOT_S = 5.0
# Torch has no hash (see its lock). Its dependencies are in cpu.lock, but for a CUDA build's.
STEPS: Sequence[tuple[str, Sequence[str]]] = (
    ("requirements", ("--no-deps", "--require-hashes", "--requirement", f"{LOCKS}/cpu.lock")),
    ("torch", ("--requirement", f"{LOCKS}/torch.lock")),
    ("vLLM", ("--no-deps", "--require-hashes", "--requirement", f"{LOCKS}/cpu-nodeps.lock")),
    ("proofserve", ("--no-deps", "--no-build-isolation", "--editable", ".")),
)
# pip's settings, and the variables by which uv takes the same.
UV_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
}
SETTING = re.compile(r"^(?:[\w:]*)\.([a-z-]+)='(.*)'$", re.MULTILINE)


class Installer:
    """Installs into one environment. Everything that pip and uv print goes to ``log``."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "setup.log"
        self.log.write_text("")
        self._python = folder / "bin" / "python"
        self._pip = (str(self._python), "-m", "pip", "--disable-pip-version-check", "install")
        self._uv: tuple[str, ...] | None = None
        self._env: Mapping[str, str] = os.environ

    def find_uv(self) -> bool:
        """Install uv itself. False where no index has it for this machine."""
        if not self._run((*self._pip, "--require-hashes", "--requirement", f"{LOCKS}/uv.lock")):
            return False
        settings = subprocess.run(
            (str(self._python), "-m", "pip", "config", "list"),
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        self._env = {
            **uv_variables(settings),
            "VIRTUAL_ENV": str(self._python.parents[1]),
            **os.environ,
        }
        self._uv = (str(self._python.with_name("uv")), "pip", "install")
        return True

    def install(self, options: Sequence[str]) -> bool:
        """Install by uv or, where uv is not there or fails, by pip."""
        return (self._uv is not None and self._run((*self._uv, *options))) or self._run(
            (*self._pip, *options)
        )

    def _run(self, command: Sequence[str]) -> bool:
        with self.log.open("a") as log:
            print("$", *command, file=log, flush=True)
            running = subprocess.Popen(command, stdout=log, stderr=log, env=self._env, cwd=ROOT)
            while True:
                try:
                    return running.wait(DOT_S) == 0
                except subprocess.TimeoutExpired:
                    print(".", end="", flush=True)


def uv_variables(pip_config: str) -> dict[str, str]:
    """The environment in which uv uses the indexes that ``pip config list`` shows."""
    found = {
        UV_VARIABLES[name]: value
        for name, value in SETTING.findall(pip_config)
        if name in UV_VARIABLES
    }
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = ",".join(found["UV_FIND_LINKS"].split())
    # As pip does: the best version of all indexes, not the first index that has the name.
    return {**found, "UV_INDEX_STRATEGY": "unsafe-best-match"}


def main(folder: Path) -> int:
    """Install everything; 0, or 1 with the reason on standard error."""
    if sys.version_info < OLDEST:
        here = ".".join(map(str, sys.version_info[:2]))
        print(
            f"proofserve needs Python 3.11 or newer, this is {here}; try make PYTHON=python3.11",
            file=sys.stderr,
        )
        return 1
    print(f"Installing into {folder} (about a minute; details in {folder}/setup.log)", flush=True)
    # As `python -m venv` does; an environment that it made may be there already.
    venv.create(folder, symlinks=os.name != "nt", with_pip=True)
    installer = Installer(folder.resolve())
    print("  uv ", end="", flush=True)
    found = installer.find_uv()
    print("" if found else "is not available here: pip installs, minutes longer", flush=True)
    for name, options in STEPS:
        began = time.monotonic()
        print(f"  {name} ", end="", flush=True)
        if not installer.install(options):
            print(" failed", flush=True)
            last = installer.log.read_text(errors="replace").splitlines()[-SHOWN:]
            print(
                *last, f"Installing {name} failed. See {installer.log}", sep="\n", file=sys.stderr
            )
            return 1
        print(f" {time.monotonic() - began:.0f} s", flush=True)
    # The measuring programs of the repository, and what they share with its tests: no wheel has it.
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder.resolve())}))
    (site / "proofserve-tools.pth").write_text(f"{ROOT / 'tools'}\n{ROOT / 'tests'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv")))
