"""The facts about this machine that decide the figures of a measurement."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("proofserve", "torch", "transformers")


def machine() -> dict[str, str | int]:
    """The cores that we may use, the processor, and the versions of Python and our packages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor_here(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor_here() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
