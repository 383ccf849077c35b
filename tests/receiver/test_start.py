"""The receiver starts at once: without torch and scipy, whose imports take seconds under load."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["receiver.app", "gateway.app", "outbox.offline", "cli.main"])
def test_the_module_imports_neither_torch_nor_scipy(module: str) -> None:
    code = (
        f"import sys, proofserve.{module}; sys.exit(bool({{'torch', 'scipy'}} & {{*sys.modules}}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
