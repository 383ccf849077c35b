"""A version of vLLM on one of its model runners, its installation and its environment.

Each is installed beside the environment of ``make setup``, whose torch it shares. A folder per
version below ``.cache/matrix`` holds the package ``vllm`` and its metadata, and torch where the
version needs another one. A process that has the folder first on its path imports those from there,
and everything else from .venv.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from matrix.results import SCHEMES
from measuring.files import CACHE, ROOT
from proofserve.engines.vetting.features import VETTED, Runner
from proofserve.models.trained import MIXTURE
from proofserve.settings.process import environment, variable

FOLDER = CACHE / "matrix"
LOCKS = ROOT / "requirements" / "matrix"
# Its CPU build is in .venv, by requirements/cpu-nodeps.lock.
IN_VENV = "0.32"
# No index has a CPU build of these. Their Python sources run on the libraries of IN_VENV.
SOURCES_ONLY = {"0.33": "0.33.0"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
LOCKED = ("--no-deps", "--require-hashes", "--requirement")
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
VERSION = (
    "__version__ = version = {version!r}\n"
    "__version_tuple__ = version_tuple = {parts}\n"
    "__commit_id__ = commit_id = None\n"
)


# Versions whose second model runner can run on a CPU, through Triton's interpreter.
INTERPRETED = ("0.32", "0.33")
INTERPRETER = ROOT / "tests" / "support" / "triton_on_cpu"
FIRST_RUNNER, SECOND_RUNNER = (
    {"VLLM_USE_V2_MODEL_RUNNER": second, "TRITON_INTERPRET": second} for second in ("0", "1")
)
# Versions whose build for CPUs chooses experts inside a kernel: sketch-v2 of a mixture is refused.
WITHOUT_EXPERTS = ("0.26", "0.29")


class InstallationFailed(RuntimeError):
    """pip could not install a version. The text has what it printed."""


def installed(minor: str) -> Path | None:
    """The folder of a version, None for the one in .venv. Raises InstallationFailed."""
    if minor == IN_VENV:
        return None
    folder, lock = FOLDER / minor, LOCKS / f"{minor}.lock"
    locked = b"".join(each.read_bytes() for each in sorted(LOCKS.glob(f"{minor}*.lock")))
    mark, digest = folder / ".lock-digest", hashlib.sha256(locked).hexdigest()
    if mark.is_file() and mark.read_text() == digest:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if minor in SOURCES_ONLY:
        _install_sources(folder, lock, SOURCES_ONLY[minor])
    else:
        into = ("install", "--no-compile", "--target", str(folder))
        _pip(*into, *LOCKED, str(lock))
        # Without hashes, and with what it depends on: see requirements/torch.lock.
        if (torch := LOCKS / f"{minor}-torch.lock").is_file():
            _pip(*into, "--requirement", str(torch))
    mark.write_text(digest)
    return folder


def _install_sources(folder: Path, lock: Path, version: str) -> None:
    """The sources of a version, the libraries of another one, and the metadata of a CPU build."""
    with tempfile.TemporaryDirectory() as name:
        build = Path(name) / "build"
        _pip("install", "--target", str(build), *LOCKED, str(LOCKS / "build.lock"))
        # pip asks a source distribution for its metadata, with these instead of all it builds with.
        asking = {
            "PYTHONPATH": str(build),
            "VLLM_VERSION_OVERRIDE": version,
            "VLLM_TARGET_DEVICE": "empty",
        }
        options = ("--no-binary", ":all:", "--no-build-isolation", "--dest", name)
        _pip("download", *options, *LOCKED, str(lock), **asking)
        (archive,) = Path(name).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(name, filter="data")
        (sources,) = Path(name).glob("vllm-*/vllm")
        shutil.move(sources, folder / "vllm")
    # Packages that this version needs and .venv lacks.
    _pip("install", "--target", str(folder), *LOCKED, str(LOCKS / f"{folder.name}-wheels.lock"))
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise InstallationFailed("the environment of `make setup` has no vLLM")
    for library in Path(found.origin).parent.glob("*.abi3.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    parts = tuple(int(part) for part in version.split("."))
    text = VERSION.format(version=version, parts=parts)
    (folder / "vllm" / "_version.py").write_text(text)
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version))


def _pip(*arguments: str, **variables: str) -> None:
    argv, env = (*PIP, *arguments), environment(variables)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InstallationFailed((done.stdout + done.stderr).strip()[-2000:])


@dataclass(frozen=True, slots=True)
class Column:
    """``skipped`` says why it does not run; empty if it does."""

    minor: str
    runner: Runner
    skipped: str = ""

    @property
    def name(self) -> str:
        return f"{self.minor}-{self.runner}"

    @property
    def models(self) -> tuple[str, ...]:
        """Those whose vectors it proves."""
        return tuple(m for m in SCHEMES if m != MIXTURE.name or self.minor not in WITHOUT_EXPERTS)

    def variables(self) -> dict[str, str]:
        """What its processes have in their environment beside ours.

        Installs the version the first time (a minute).
        """
        runner = SECOND_RUNNER if self.runner == "V2" else FIRST_RUNNER
        own = [installed(self.minor), INTERPRETER if self.runner == "V2" else None]
        path = [*(str(each) for each in own if each), variable("PYTHONPATH")]
        return {**runner, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def columns() -> list[Column]:
    """Every column, those of runners that are not vetted yet as skipped."""
    made = []
    for row in VETTED:
        made += [Column(row.minor, runner) for runner in row.runners]
        if "V2" not in row.runners and row.minor in INTERPRETED:
            why = "proofs on this runner are not in the table of vetted versions"
            made.append(Column(row.minor, "V2", why))
    return made
