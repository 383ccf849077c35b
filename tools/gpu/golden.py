"""Replays the golden vectors by pytest on one device, and counts the cases of each file.

The step sets GOLDEN_DEVICE, which the tests read; ``--device`` names it in the record.
"""

import sys
from collections import Counter
from typing import Any

import pytest
import torch

from gpu.report import step_parser, write_record
from measuring.files import ROOT
from proofserve.protocol.device import kernels_for

TESTS = ROOT / "tests" / "golden"
# Without this repository's settings for pytest: they name plugins that a GPU host may lack.
OPTIONS = ("-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default", "-q")
MOST_FAILURES = 20


class Counted:
    """A plugin of pytest that counts outcomes by golden file."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failures: list[dict[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = dict(report.user_properties).get("golden_file")
        if report.failed:
            text = str(report.longrepr).splitlines()
            self.failures.append({"test": report.nodeid, "error": text[-1] if text else ""})
        elif report.when == "call" and file is not None:
            self.passed[file] += 1


def main() -> int:
    """0 if every case was replayed."""
    parser = step_parser(__doc__)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    counted = Counted()
    # The other tests' settings need packages that a host may lack.
    own = (f"--confcutdir={TESTS}", "-p", "no:cacheprovider")
    code = pytest.main([str(TESTS), *OPTIONS, *own], plugins=[counted])
    figures: dict[str, float | None] = {
        "cases_passed": counted.passed.total(),
        "cases_failed": len(counted.failures),
        "files": len(counted.passed),
    }
    windows = {"passed": counted.passed, "failures": counted.failures[:MOST_FAILURES]}
    failed = ["cases_failed"] if code else []
    by = "torch" if kernels_for(torch.device(options.device)) is None else "Triton"
    setup = {"device": options.device, "inputs_drawn_by": by}
    write_record(options.json, figures, setup=setup, windows=windows, failed=failed)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
