"""The example of docs/offline.md: a call answers at once, and is deferred while requests run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from proofserve.settings.process import environment
from support.engines import SEQ_LEN

pytestmark = pytest.mark.engine

TESTS = Path(__file__).parent.parent


def offline_example() -> str:
    page = (TESTS.parent / "docs" / "offline.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    # The work of the vectors that the other tests of this folder compute.
    code = code.replace("0xabc", "block").replace("node-key", "key")
    return str(code).replace("seq_len=256", f"seq_len={SEQ_LEN}")


def test_the_documented_offline_engine_defers_while_requests_are_unfinished(
    tiny: Path, tmp_path: Path, vectors: NDArray[np.float32], cpu_environment: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offline_example.py").write_text(offline_example())
    path = os.pathsep.join([str(TESTS), str(tmp_path), os.environ["PYTHONPATH"]])
    env = environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path})
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
