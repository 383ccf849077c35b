"""The facts about a machine that decide what can run there: torch, cards, vLLM, memory, disk.

It needs the standard library alone; torch is asked where it is installed. ``make gpu`` uses it on
hosts that have torch and transformers and nothing else.
"""

import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from proofserve.host import (
    EMULATED,
    GIB,
    PLUGIN,
    PLUGIN_GROUP,
    ServedDtype,
    memory_gib,
    of_cards,
    package_version,
    quick_dtype,
    vllm_version,
)

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")
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
        transformers=package_version("transformers"),
        vllm=vllm_version(),
        plugin=any(each.name == PLUGIN for each in metadata.entry_points(group=PLUGIN_GROUP)),
        missing=tuple(name for name in required if package_version(name) is None),
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
    version = package_version("torch")
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
    return of_cards("name,driver_version")


def free_disk_gib(path: Path) -> float:
    """The space that is free where ``path`` is, or would be made."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free / GIB


def served_in(dtype: ServedDtype) -> str:
    """The dtype in words, with the reason for one that is not the usual one."""
    if quick_dtype() == "bfloat16":
        return f"in {dtype}"
    if dtype == "bfloat16":
        return f"in {dtype}, {EMULATED}"
    return f"in {dtype}, because this processor has no instructions for bfloat16"
