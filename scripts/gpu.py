"""Runs ``python -m gpu`` with the Python of this host that has torch and the card: ``make gpu``.

    python3 scripts/gpu.py [--wheels FOLDER] [--packages] [OPTIONS OF THE RUN]

Packages that the run needs and this host lacks go into .gpu-venv, which sees everything that is
installed here and changes nothing of it: from FOLDER alone if it is given, else from pip's index.
Where that fails the run goes on, and steps that lack a package say so. ``--packages`` lists all
that may be needed, for `pip download`. This file needs nothing but Python itself.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
ADDED = ROOT / ".gpu-venv"
# vLLM finds plugins by the metadata of an installed package.
OURS = "proofserve"
# Exit codes 0: torch sees a card; 3: it sees none. Anything else: there is no torch.
PROBE = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
PROBE_S = 120
MISSING = (
    "import sys\nfrom importlib.metadata import version, PackageNotFoundError\n"
    "for name in sys.argv[1:]:\n"
    "    try: version(name)\n"
    "    except PackageNotFoundError: print(name)\n"
)
# A host without an index shall not wait for it.
PIP = ("--disable-pip-version-check", "--retries", "1", "--timeout", "10", "install", "--quiet")
SITES = "import sysconfig; p = sysconfig.get_paths(); print(p['purelib']); print(p['platlib'])"


def interpreter() -> str:
    """This Python or the one of .venv: the first whose torch sees a card, else that has torch."""
    candidates = [sys.executable]
    if (ROOT / ".venv" / "bin" / "python").exists():
        candidates.append(str(ROOT / ".venv" / "bin" / "python"))
    with_torch = []
    for python in candidates:
        code = _probe(python)
        if code == 0:
            return python
        if code == 3:
            with_torch.append(python)
    return (with_torch or candidates)[0]


def _probe(python: str) -> int:
    try:
        return subprocess.run(
            (python, "-c", PROBE), capture_output=True, timeout=PROBE_S, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return 1


def missing(python: str, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``python`` cannot import as installed packages."""
    argv = (python, "-c", MISSING, *names)
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


def extended(python: str) -> str:
    """The Python of .gpu-venv, which also has all packages of ``python``."""
    # Without pip: a host's Python may lack the module that puts pip into an environment.
    subprocess.run((python, "-m", "venv", "--without-pip", str(ADDED)), check=True)
    sites = subprocess.run((python, "-c", SITES), capture_output=True, text=True, check=True)
    lines = [f"import site; site.addsitedir({folder!r})" for folder in sites.stdout.splitlines()]
    (site,) = ADDED.glob("lib/python*/site-packages")
    (site / "host.pth").write_text("\n".join(dict.fromkeys(lines)) + "\n")
    return str(ADDED / "bin" / "python")


def install(python: str, target: str, names: Sequence[str], wheels: Path | None) -> None:
    """Install ``names`` beside ``target`` by the pip of ``python``; say which could not be."""
    pip = (python, "-m", "pip", "--python", target, *PIP)
    others = [name for name in names if name != OURS]
    if wheels:
        # One package that is not there would stop the installation of all.
        others = [name for name in others if any(wheels.glob(f"{_file_name(name)}-*"))]
    source = ("--no-index", "--find-links", str(wheels.absolute())) if wheels else ()
    if others:
        _ran((*pip, *source, *others))
    if OURS in names:
        _ran((*pip, "--no-index", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
    if left := missing(target, names):
        print(f"not installed: {' '.join(left)}; steps that need them are skipped", flush=True)


def _file_name(package: str) -> str:
    """How the file of a wheel begins; capitals count as they are."""
    letters = package.replace("-", "_").replace(".", "_")
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in letters)


def _ran(argv: Sequence[str]) -> bool:
    return subprocess.run(argv, cwd=ROOT, check=False).returncode == 0


def main() -> NoReturn:
    """Become the run; or exit with 0 after ``--packages``, with 2 if this Python is too old."""
    if sys.version_info < OLDEST:
        here = ".".join(map(str, sys.version_info[:2]))
        print(f"make gpu needs Python 3.11 or newer, this is {here}", file=sys.stderr)
        sys.exit(2)
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--packages", action="store_true")
    options, rest = parser.parse_known_args()
    for folder in (ROOT / "tools", ROOT / "src"):
        sys.path.insert(0, str(folder))
    from gpu.host import required  # noqa: PLC0415 - from the checkout, which is on the path now

    names = [*(name for name in required() if name != "torch"), OURS]
    if options.packages:
        print(*names[:-1])
        sys.exit(0)
    for place in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if not any(Path(place).glob("*")):
            print(f"PYTHONPATH: nothing is in {place}; were all wheels unpacked?", flush=True)
    python = interpreter()
    print(f"using {python}", flush=True)
    if lacking := missing(python, names):
        print(f"adding to {ADDED.name}: {' '.join(lacking)}", flush=True)
        host, python = python, extended(python)
        install(host, python, missing(python, names), options.wheels)
    # Where the package could not be installed, its sources still run.
    path = os.pathsep.join(
        [str(ROOT / "tools"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    )
    env = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}
    os.chdir(ROOT)
    # In the place of this process, so that Ctrl-C reaches the run alone and it writes its report.
    os.execve(python, [python, "-m", "gpu", *rest], env)  # noqa: S606 - see above


if __name__ == "__main__":
    main()
