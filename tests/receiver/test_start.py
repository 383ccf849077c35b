"""The receiver starts at once: without torch, whose import takes seconds, or minutes under load."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["receiver.app", "gateway.http.app", "outbox.offline", "cli.main"]
)
def test_the_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, proofserve.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
