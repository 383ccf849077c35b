"""Says at the end of a run how many golden cases of how many files were replayed."""

from collections.abc import Iterable
from typing import Any

import pytest

from .cases import DEVICE, GOLDEN_DIR


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = _files(terminalreporter.stats.get("passed", []))
    failed = _files(terminalreporter.stats.get("failed", []))
    if passed or failed:
        terminalreporter.write_line(
            f"golden: {len(passed)} cases of {len(set(passed))} files passed, "
            f"{len(failed)} cases of {len(set(failed))} files failed, "
            f"on {DEVICE}, from {GOLDEN_DIR}"
        )


def _files(reports: Iterable[Any]) -> list[str]:
    """The file of every golden case among the reports of one outcome."""
    return [
        value
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == "golden_file"
    ]
