"""The tap of receipts on a worker: which row belongs to which token, and what is kept."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from proofserve.engines.receipts import tap as tap_module
from proofserve.engines.receipts.compat_answers import before_sampling, sampled_rows
from proofserve.engines.receipts.tap import SampledRows, Tap, Wanted
from proofserve.engines.vllm.support import UnsupportedEngine
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches

HIDDEN, K_DIM = 24, 16
PROJECTION = ReceiptScheme("key", "ab" * 32, K_DIM).rows(HIDDEN, torch.device("cpu"))


def state(request: str, position: int, version: int = 0) -> torch.Tensor:
    """The state of a request at a position; ``version`` counts recomputations."""
    seed = sum(request.encode()) * 1000 + position * 10 + version
    return torch.randn(HIDDEN, generator=torch.Generator().manual_seed(seed))


def step(tap: Tap, *rows: tuple[str, int], version: int = 0) -> None:
    """One step with a row for each (request, position)."""
    states = torch.stack([state(name, at, version) for name, at in rows])
    positions = np.array([at for _, at in rows], np.int64)
    tap.take(SampledRows([name for name, _ in rows], positions, lambda: states))


def expected(request: str, positions: Sequence[int], version: int = 0) -> bytes:
    states = torch.stack([state(request, at, version) for at in positions])
    return sketches(states, PROJECTION).to(torch.float16).numpy().tobytes()


def new_tap(most_rows: int = 1000) -> Tap:
    return Tap(PROJECTION, most_rows)


def test_rows_of_requests_that_share_steps_are_told_apart() -> None:
    tap = new_tap()
    step(tap, ("a", 9), ("b", 3))
    step(tap, ("b", 4), ("a", 10), ("c", 0))
    step(tap, ("a", 11))
    wanted = [Wanted("b", 3, 2), Wanted("a", 9, 3)]
    assert tap.fetch(wanted, ["c"]) == [expected("b", [3, 4]), expected("a", [9, 10, 11])]
    assert tap.fetch([Wanted("c", 0, 1)], []) == [expected("c", [0])]


def test_rows_of_a_prompts_parts_are_left_out() -> None:
    tap = new_tap()
    for position in (15, 31, 39, 40):
        step(tap, ("a", position))
    assert tap.fetch([Wanted("a", 39, 2)], []) == [expected("a", [39, 40])]


@pytest.mark.parametrize("fetch_between", [True, False])
def test_the_last_row_at_a_position_counts(fetch_between: bool) -> None:
    tap = new_tap()
    for position in (5, 6, 7):
        step(tap, ("a", position))
    if fetch_between:
        assert tap.fetch([], ["a"]) == []
    step(tap, ("a", 6), version=1)
    step(tap, ("a", 7), version=1)
    rows = expected("a", [5]) + expected("a", [6, 7], version=1)
    assert tap.fetch([Wanted("a", 5, 3)], []) == [rows]


def test_a_missing_row_loses_the_answer_and_not_the_others() -> None:
    tap = new_tap()
    step(tap, ("a", 5), ("b", 5))
    step(tap, ("b", 6))
    step(tap, ("a", 7))
    wanted = [Wanted("a", 5, 3), Wanted("b", 5, 2), Wanted("unknown", 0, 1)]
    assert tap.fetch(wanted, []) == [None, expected("b", [5, 6]), None]


def test_rows_of_requests_that_are_gone_are_dropped() -> None:
    tap = new_tap(most_rows=2)
    step(tap, ("a", 0), ("late", 0))
    assert tap.fetch([Wanted("a", 0, 1)], []) == [expected("a", [0])]
    # Both places are free again.
    step(tap, ("b", 0), ("c", 0))
    wanted = [Wanted("b", 0, 1), Wanted("c", 0, 1), Wanted("late", 0, 1)]
    assert tap.fetch(wanted, []) == [expected("b", [0]), expected("c", [0]), None]


def test_beyond_the_limit_requests_of_the_step_lose_their_sketches() -> None:
    tap = new_tap(most_rows=3)
    step(tap, ("a", 0), ("b", 0), ("c", 0))
    step(tap, ("a", 1))
    step(tap, ("a", 0), version=1)
    wanted = [Wanted("a", 0, 1), Wanted("b", 0, 1), Wanted("c", 0, 1)]
    assert tap.fetch(wanted, []) == [None, expected("b", [0]), expected("c", [0])]
    # The same id of a later request is not affected.
    step(tap, ("a", 0))
    assert tap.fetch([Wanted("a", 0, 1)], []) == [expected("a", [0])]


def test_an_error_costs_the_sketches_of_the_step_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("no states")

    tap = new_tap()
    step(tap, ("a", 0), ("b", 0))
    tap.take(SampledRows(["a"], np.array([1]), broken))
    step(tap, ("b", 1))
    found = tap.fetch([Wanted("a", 0, 1), Wanted("b", 0, 2)], [])
    assert found == [None, expected("b", [0, 1])]
    assert "no states" in caplog.text


def test_long_answers_are_sorted_while_nobody_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap_module, "MOST_STEPS", 7)
    tap = new_tap()
    for position in range(50):
        step(tap, ("a", position), ("b", position + 3))
    wanted = [Wanted("a", 0, 50), Wanted("b", 3, 50)]
    assert tap.fetch(wanted, []) == [expected("a", range(50)), expected("b", range(3, 53))]


def test_a_state_that_is_not_finite_is_kept_as_nan() -> None:
    tap = new_tap()
    states = torch.full((1, HIDDEN), torch.nan)
    tap.take(SampledRows(["a"], np.array([0]), lambda: states))
    (found,) = tap.fetch([Wanted("a", 0, 1)], [])
    assert found is not None
    assert np.isnan(np.frombuffer(found, "<f2")).all()


def first_runner() -> tuple[Any, Any]:
    batch = SimpleNamespace(
        req_ids=["a", "b"], num_reqs=2, num_computed_tokens_cpu=np.array([10, 0, 77], np.int32)
    )
    scheduled = SimpleNamespace(num_scheduled_tokens={"b": 8, "a": 1})
    rows = torch.arange(3.0).reshape(3, 1)
    return SimpleNamespace(input_batch=batch), SimpleNamespace(
        scheduler_output=scheduled, sample_hidden_states=rows
    )


def second_runner() -> tuple[Any, Any]:
    batch = SimpleNamespace(
        req_ids=["a", "b"],
        num_computed_tokens_np=np.array([10, 0], np.int32),
        num_scheduled_tokens=np.array([1, 8], np.int32),
        logits_indices=torch.tensor([0, 8]),
    )
    hidden = torch.tensor([[0.0], *[[9.0]] * 7, [1.0], [9.0]])
    return SimpleNamespace(), SimpleNamespace(input_batch=batch, hidden_states=hidden)


@pytest.mark.parametrize("made", [first_runner, second_runner])
def test_both_runners_give_last_rows_and_their_positions(made: Any) -> None:
    sampled = sampled_rows(*made())
    assert sampled.ids == ["a", "b"]
    assert sampled.positions.tolist() == [10, 7]
    assert sampled.states().tolist() == [[0.0], [1.0]]


def test_the_state_is_read_before_the_worker_samples() -> None:
    runner, made = first_runner()
    runner.execute_model_state = made

    def sample(grammar: str) -> str:
        runner.execute_model_state = None
        return f"sampled by {grammar}"

    inner = SimpleNamespace(model_runner=runner, sample_tokens=sample)
    seen: list[SampledRows] = []
    before_sampling(SimpleNamespace(worker=inner), seen.append)
    assert inner.sample_tokens("grammar") == "sampled by grammar"
    assert [each.ids for each in seen] == [["a", "b"]]
    # A step without a forward on this rank has no state.
    inner.sample_tokens("grammar")
    assert len(seen) == 1


def test_a_runner_without_the_state_is_refused() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace(), sample_tokens=None)
    with pytest.raises(UnsupportedEngine, match="without --receipts"):
        before_sampling(worker, lambda _: None)
