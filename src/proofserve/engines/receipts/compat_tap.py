"""vLLM's private names in its workers that the tap of receipts reads, for both model runners."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from proofserve.engines.vllm.support import UnsupportedEngine


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The last row of each request in a step, one for each of ``ids``.

    ``states`` gives them as [n, hidden_size] on the device: the final norm's output, from which
    the logits were made. The row at a position chooses the token at the next one. The last row of
    an unfinished part of a prompt chooses none.
    """

    ids: list[str]
    positions: NDArray[np.int64]
    states: Callable[[], torch.Tensor]


def has_rows() -> bool:
    """Whether this rank keeps the rows: the first of the last pipeline stage.

    Relies on: get_pp_group, get_tp_group; the final norm's output being whole on every rank of a
    tensor-parallel group.
    """
    return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)


def before_sampling(worker: Any, take: Callable[[SampledRows], None]) -> None:
    """Call ``take`` in each step, between the forward and the choice of tokens.

    Raises UnsupportedEngine if the worker or its model runner lacks the names.

    Relies on: Worker.sample_tokens being looked up on the worker for each step;
    WorkerWrapperBase.worker; execute_model_state of either model runner being set from the forward
    until sample_tokens reads it.
    """
    inner = getattr(worker, "worker", worker)
    runner = inner.model_runner
    if not hasattr(inner, "sample_tokens") or not hasattr(runner, "execute_model_state"):
        raise UnsupportedEngine(
            f"{type(runner).__name__} does not keep the rows that chose the tokens; start without "
            "--receipts."
        )
    sample = inner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        state = runner.execute_model_state
        if state is not None:
            take(sampled_rows(runner, state))
        return sample(*args, **kwargs)

    inner.sample_tokens = sample_tokens


def sampled_rows(runner: Any, state: Any) -> SampledRows:
    """The rows of a step, from ``state``, the runner's execute_model_state.

    Without speculative decoding a request has one row in a step.

    Relies on: the second runner's state having ``input_batch``, the first one's not.
    """
    return _second_runner(state) if hasattr(state, "input_batch") else _first_runner(runner, state)


def _first_runner(runner: Any, state: Any) -> SampledRows:
    """Relies on: ExecuteModelState.sample_hidden_states, .scheduler_output.num_scheduled_tokens;
    GPUModelRunner.input_batch.req_ids, .num_reqs, .num_computed_tokens_cpu.
    """
    batch = runner.input_batch
    ids = list(batch.req_ids[: batch.num_reqs])
    scheduled = state.scheduler_output.num_scheduled_tokens
    added = np.array([scheduled[name] for name in ids], np.int64)
    positions = batch.num_computed_tokens_cpu[: len(ids)] + added - 1
    return SampledRows(ids, positions, lambda: state.sample_hidden_states[: len(ids)])


def _second_runner(state: Any) -> SampledRows:
    """Relies on: ExecuteModelState.hidden_states and .input_batch; InputBatch.req_ids,
    .num_computed_tokens_np, .num_scheduled_tokens, .logits_indices.
    """
    batch = state.input_batch
    ids = list(batch.req_ids)
    ends = batch.num_computed_tokens_np[: len(ids)] + batch.num_scheduled_tokens[: len(ids)]
    rows = partial(_rows_at, state.hidden_states, batch.logits_indices[: len(ids)])
    return SampledRows(ids, ends.astype(np.int64) - 1, rows)


def _rows_at(hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return hidden[places]
