"""The environment in which vLLM's second model runner works on a CPU, and who runs there."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from proofserve.protocol.scheme import Scheme
from proofserve.protocol.schemes import scheme
from proofserve.settings.process import environment

# What both runners prove, by names for files.
SCHEMES: dict[str, Scheme] = {
    "artifact": scheme("artifact-v1", k_dim=12),
    "layers": scheme("artifact-v1-layers", k_dim=12),
    "sketch": scheme("sketch-v1"),
    "distance": scheme("distance-v1", layer_hooks=False),
    "distance_layers": scheme("distance-v1", layer_hooks=True),
}
NONCES = range(16)
TESTS = Path(__file__).parents[1]
STAND_IN = Path(__file__).parent / "triton_on_cpu"
# vLLM's worker logs it.
CHOSEN = "Using V2 Model Runner"


def second_runner_environment(**changes: str) -> Mapping[str, str]:
    """For a process that starts vLLM, and its children.

    Triton reads its variable when vLLM is imported, so no process that has imported vLLM can
    change over.
    """
    path = [str(STAND_IN), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return environment(
        {
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            **changes,
        }
    )


def run_on_second_runner(
    *arguments: str, timeout: float, **changes: str
) -> "subprocess.CompletedProcess[str]":
    """What became of Python with these arguments; fails the test if it did not end well."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=dict(second_runner_environment(**changes)),
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-8000:]
    return ran
