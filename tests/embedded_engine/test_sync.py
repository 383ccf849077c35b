"""The synchronous engine: a proof call answers at once, and not while requests are unfinished."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.settings.process import environment

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parent.parent


def test_a_synchronous_engine_defers_while_requests_are_unfinished(
    tiny: Path, vectors: NDArray[np.float32], cpu_environment: pytest.MonkeyPatch
) -> None:
    env = environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": str(TESTS)})
    script = str(TESTS / "embedded_engine" / "sync_engine.py")
    ran = subprocess.run(
        [sys.executable, script, str(tiny)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    read = json.loads(ran.stdout.splitlines()[-1])
    assert len(read["during"]) >= 8
    assert set(read["during"]) == {"Deferred"}
    assert read["same_afterwards"]
    assert read["leased_blocks"] == 0
    assert np.linalg.norm(np.array(read["values"]) - vectors[:8], axis=1).max() < 0.002
