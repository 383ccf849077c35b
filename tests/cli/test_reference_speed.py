from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proofserve.reports import Progress, ReportedError
from proofserve_lab.bench import reference as measuring
from proofserve_lab.bench.reference import bench_reference, multiply_rate, seconds_of

CPU = torch.device("cpu")
NETWORK: Any = SimpleNamespace(weights=1000, device=CPU, dtype=torch.float32)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that does nothing, with memory for 16 tokens."""
    monkeypatch.setattr(
        measuring, "forward", lambda _network, seq_len, batch: seq_len * batch <= 16
    )


@pytest.mark.usefixtures("little_room")
def test_what_there_is_no_memory_for_is_left_out() -> None:
    report = bench_reference("toy", NETWORK, (4, 8), (1, 2, 4), 0.001, Progress())
    figures = {figure.name: figure for figure in report.figures}
    assert "nonces_per_second_4_4" in figures
    assert "nonces_per_second_8_2" in figures
    assert "nonces_per_second_8_4" not in figures
    assert sum(figure.meaning.endswith("the best") for figure in report.figures) == 2
    # 2 * weights * seq_len multiplications and additions a nonce.
    # The last combination that was measured: 2 * weights * seq_len operations a nonce.
    speed, share = figures["nonces_per_second_8_2"].value, figures["share_8_2"].value
    beside = sum(report.windows["matmul_flops"][-2:]) / 2
    assert speed is not None
    assert share == pytest.approx(speed * 2 * 1000 * 8 / beside)


@pytest.mark.usefixtures("little_room")
def test_no_memory_at_all_is_said() -> None:
    with pytest.raises(ReportedError, match="no memory for a forward of 64 tokens"):
        bench_reference("toy", NETWORK, (4, 64), (1, 2), 0.001, Progress())


def test_the_first_call_only_warms_up() -> None:
    calls: list[None] = []
    seconds_of(lambda: calls.append(None), CPU, window_s=0.0)
    assert len(calls) == 3


def test_a_multiplication_takes_its_time() -> None:
    # No machine of this world is slower, or faster.
    assert 1e6 < multiply_rate(512, CPU, torch.float32, window_s=0.01) < 1e15
