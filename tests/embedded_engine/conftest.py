"""One real engine for all tests of the adapter that do not need another deployment."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from support.engines import SKETCH, SPOILABLE, EmbeddedEngine, workload

# The environment of vLLM's CPU build, set before any engine starts.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "POC_FORWARD_BATCH": "8",
    "POC_LEASE_IDLE_SEC": "3",
}


@contextmanager
def patched_environment() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        yield patch


@pytest.fixture(scope="module")
def cpu_environment() -> Iterator[pytest.MonkeyPatch]:
    """For tests that start engines of their own."""
    with patched_environment() as patch:
        yield patch


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Iterator[EmbeddedEngine]:
    # Its processes have the environment from their start; tests of other things must not.
    with patched_environment():
        # float32, so that a difference between two deployments is a mistake and not a rounding.
        embedded = EmbeddedEngine(tiny, dtype="float32", **SPOILABLE)
    yield embedded
    embedded.close()


@pytest.fixture(scope="session")
def vectors(engine: EmbeddedEngine) -> NDArray[np.float32]:
    """Nonces 0..31 on one rank, float32 [32, 12]."""
    return engine.run(engine.prove(workload(), range(32))).values


@pytest.fixture(scope="session")
def sketches(engine: EmbeddedEngine) -> NDArray[np.float32]:
    """Nonces 0..15 on one rank, float32 [16, 128]."""
    return engine.run(engine.prove(workload(made_by=SKETCH), range(16))).values
