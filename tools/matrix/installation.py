"""Installs a version of vLLM beside the environment of ``make setup``, whose torch it shares.

A folder per version below ``.cache/matrix`` holds the package ``vllm`` and its metadata, and torch
where the version needs another one. A process that has the folder first on its path imports those
from there, and everything else from .venv.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from measuring.files import CACHE, ROOT
from proofserve.settings.process import environment

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
    for library in _vllm_in_venv().glob("*.abi3.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    parts = tuple(int(part) for part in version.split("."))
    text = VERSION.format(version=version, parts=parts)
    (folder / "vllm" / "_version.py").write_text(text)
    info = folder / f"vllm-{version}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(version=version))


def _vllm_in_venv() -> Path:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise InstallationFailed("the environment of `make setup` has no vLLM")
    return Path(found.origin).parent


def _pip(*arguments: str, **variables: str) -> None:
    argv, env = (*PIP, *arguments), environment(variables)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InstallationFailed((done.stdout + done.stderr).strip()[-2000:])
