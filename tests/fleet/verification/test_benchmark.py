"""The short form of ``python -m benchmarks.fleet verify``: it counts; times are not judged."""

from pathlib import Path

import pytest

from benchmarks.fleet.verify import DatabaseKind, Plan, measure


@pytest.mark.slow  # ten processes import torch: a minute of processor time
def test_workers_and_single_processes_reach_their_verdicts(tmp_path: Path) -> None:
    plan = Plan(DatabaseKind.SQLITE, 4, 0.01, verified=4, nonces=12, seq_len=32)
    report = measure(plan, tmp_path)
    figures = {each.name: each.value for each in report.figures}
    assert set(figures) == {
        *("overhead_ms", "workers_jobs_per_s", "singles_jobs_per_s", "workers_over_singles")
    }
    assert all(value is not None and value > 0.0 for value in figures.values())
