"""The check of vLLM's version when a server starts."""

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm

from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.engines.vllm.vetting.pins import Feature, moved
from proofserve.engines.vllm.vetting.sources import Sources
from proofserve.engines.vllm.vetting.versions import VETTED, vetting_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineVersion:
    """vLLM's version, and why it is accepted."""

    number: str
    reason: str


def require_vetted(allow_unvetted: bool, features: Sequence[Feature]) -> EngineVersion:
    """The version of the installed vLLM.

    With ``allow_unvetted`` a version that was not vetted is accepted if its sources define every
    name that ``features`` rely on. Raises UnsupportedEngine with the reason and what to do.
    """
    version = str(vllm.__version__)
    row = vetting_of(version)
    if row is not None:
        return EngineVersion(version, f"version {version} was vetted: {row.how}")
    if not allow_unvetted:
        known = ", ".join(each.minor for each in VETTED)
        raise UnsupportedEngine(
            f"vLLM {version} was not vetted with this release of proofserve (vetted: {known}). "
            "Install a vetted version, start without --enable-poc, or set --poc-unvetted / "
            "POC_UNVETTED=1: proofs then start if this vLLM has every name on which they rely."
        )
    began = time.monotonic()
    with _no_collections():
        lost = moved(features, Sources(Path(vllm.__file__).parent))
    if lost:
        raise UnsupportedEngine(
            f"vLLM {version} was not vetted, and --poc-unvetted / POC_UNVETTED cannot start it: "
            f"it has {'; '.join(lost)}. Install a vetted version, or start without what needs this."
        )
    count, seconds = sum(len(each.pins) for each in features), time.monotonic() - began
    found = f"version {version} was not vetted; {count} pins hold, checked in {seconds:.2f} s"
    _logger.warning("vLLM %s. Verify a round of this server before it earns anything.", found)
    return EngineVersion(version, found)


def require_vetted_runner(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for a model runner on which a vetted version was not vetted.

    Relies on: VllmConfig.use_v2_model_runner.
    """
    row = vetting_of(str(vllm.__version__))
    if row is not None and vllm_config.use_v2_model_runner and "V2" not in row.runners:
        raise UnsupportedEngine(
            f"proofs were not vetted on the second model runner of vLLM {row.minor}. Set "
            "VLLM_USE_V2_MODEL_RUNNER=0 (proofserve serve does)."
        )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Syntax trees are many objects: Python's collector would take half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
