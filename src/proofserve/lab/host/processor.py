"""In which numbers a small model is served quickly on this machine."""

from enum import StrEnum
from pathlib import Path
from typing import Final

from proofserve.lab.host.facts import vllm_version

# Products of bf16 matrices: in AVX-512, in Intel's tiles, and in NEON.
_INSTRUCTIONS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_PROCESSORS: Final = Path("/proc/cpuinfo")


class ServedDtype(StrEnum):
    """Of weights and values, as vLLM's option ``--dtype`` names it."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def quick_dtype(processors: Path = _PROCESSORS) -> ServedDtype:
    """The dtype in which the installed vLLM serves quickly here.

    A processor without instructions for bf16 multiplies such matrices at a tenth of the speed of
    float32 ones (measured on a Zen 3: 15 and 120 GFLOP/s). Cards have them, and vLLM's build for
    cards is taken to run on one.
    """
    on_processor = "cpu" in (vllm_version() or "")
    slow = on_processor and not multiplies_bf16(processors)
    return ServedDtype.FLOAT32 if slow else ServedDtype.BFLOAT16


def multiplies_bf16(processors: Path = _PROCESSORS) -> bool:
    """Whether the processor has instructions for products of bf16 matrices; True if unknown."""
    try:
        lines = processors.read_text().splitlines()
    except OSError:
        return True
    # x86 has flags, ARM has Features.
    known = [line for line in lines if line.startswith(("flags", "Features"))]
    return not known or not _INSTRUCTIONS.isdisjoint(known[0].split())
