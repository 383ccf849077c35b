"""Pins vLLM's private names that receipts rely on, of both model runners, and names the caller."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import model_runner as second_model_runner
from vllm.v1.worker.gpu.input_batch import InputBatch as SecondInputBatch
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from proofserve.engines.receipts.compat_answers import ended_answer, has_receipt, sampling_of
from proofserve.engines.vllm import support
from proofserve.protocol.receipts.record import Sampling
from support.contract import in_order, parameters, since, source


def test_before_sampling() -> None:
    assert "self.model_runner.sample_tokens(grammar_output)" in source(Worker.sample_tokens)
    assert CPUWorker.sample_tokens is Worker.sample_tokens
    assert "sample_tokens" not in vars(WorkerWrapperBase)
    assert "getattr(self.worker, attr)" in source(WorkerWrapperBase.__getattr__)
    assert "getattr(self.worker, method)" in source(WorkerProc)
    assert '"sample_tokens"' in source(MultiprocExecutor.sample_tokens)
    assert '"sample_tokens"' in source(UniProcExecutor.sample_tokens)
    for runner in (gpu_model_runner.GPUModelRunner, second_model_runner.GPUModelRunner):
        assert "self.execute_model_state = ExecuteModelState(" in source(runner)
        assert in_order(
            source(runner.sample_tokens),
            "if self.execute_model_state is None",
            "self.execute_model_state = None",
        )


def test_first_runner() -> None:
    state = gpu_model_runner.ExecuteModelState
    assert {"sample_hidden_states", "scheduler_output"} <= set(state._fields)
    assert "input_batch" not in state._fields
    execute = source(gpu_model_runner.GPUModelRunner.execute_model)
    assert "sample_hidden_states = hidden_states[logits_indices]" in execute
    assert "logits = self.model.compute_logits(sample_hidden_states)" in execute
    prepare = source(gpu_model_runner.GPUModelRunner._prepare_inputs)
    assert "logits_indices = query_start_loc[1:] - 1" in prepare
    assert "self.num_computed_tokens_cpu = " in source(InputBatch.__init__)
    assert {"req_ids", "num_reqs"} <= set(dir(InputBatch))


def test_second_runner() -> None:
    state = second_model_runner.ExecuteModelState
    assert {"input_batch", "hidden_states"} <= set(state._fields)
    assert {
        "req_ids", "num_computed_tokens_np", "num_scheduled_tokens", "logits_indices",
    } <= set(SecondInputBatch.__dataclass_fields__)  # fmt: skip
    sample = source(second_model_runner.GPUModelRunner.sample)
    assert "hidden_states[input_batch.logits_indices]" in sample


def test_fetch_rows() -> None:
    for executor in (MultiprocExecutor, UniProcExecutor):
        assert parameters(executor.collective_rpc)[:6] == [
            "self", "method", "timeout", "args", "kwargs", "non_block",
        ]  # fmt: skip
    # The replies of earlier calls are read before this one's, so a step's stay its own.
    assert "Drain any futures ahead of us" in source(FutureWrapper.result)


@pytest.mark.parametrize("scheduler", [Scheduler, AsyncScheduler])
def test_watch_the_scheduler(scheduler: type[Scheduler]) -> None:
    assert parameters(scheduler._free_request)[:2] == ["self", "request"]
    assert "self._free_request(request)" in source(scheduler.update_from_output)
    assert in_order(
        source(scheduler.finish_requests),
        "request.status = finished_status",
        "self._free_request(request, delay_free_blocks=delay_free_blocks)",
    )
    assert source(Scheduler).count("self._free_request(") == 2
    assert "self.requests: dict[str, Request] = {}" in source(Scheduler.__init__)


def test_watch_the_core() -> None:
    # The outputs of a step are on their way before answers are collected.
    assert in_order(
        source(EngineCoreProc._process_engine_step),
        "self.output_queue.put_nowait(output)",
        "self.post_step(model_executed)",
    )
    assert "self.preprocess_add_request(req)" in source(EngineCoreProc.process_input_sockets)
    assert "return req, request.current_wave" in source(EngineCore.preprocess_add_request)


def test_request_notes() -> None:
    assert parameters(OutputProcessor.add_request)[:4] == [
        "self", "request", "prompt", "parent_req",
    ]  # fmt: skip
    assert "output_processor.process_outputs(" in source(AsyncLLM._run_output_handler)
    assert "self.request_states.pop(req_id)" in source(OutputProcessor._finish_request)
    assert "self.output_processor.add_request(" in source(AsyncLLM)
    assert isinstance(ParentRequest.n, property)
    assert 'f"{index}_{self.request_id}"' in source(ParentRequest.get_child_info)


def test_changes_logits() -> None:
    assert ("watermark_config" in VllmConfig.__dataclass_fields__) == since(0, 30)
    assert "logits_processors" in ModelConfig.__dataclass_fields__


def test_options_with_which_receipts_would_be_wrong_are_refused() -> None:
    def config(speculative: object = None, executor: str = "mp") -> SimpleNamespace:
        parallel = SimpleNamespace(distributed_executor_backend=executor, _api_process_count=1)
        return SimpleNamespace(speculative_config=speculative, parallel_config=parallel)

    support.require_receipts(config())
    with pytest.raises(ValueError, match=r"POC_RECEIPTS.*--speculative-config"):
        support.require_receipts(config(speculative=object()))
    with pytest.raises(ValueError, match=r"POC_RECEIPTS.*--distributed-executor-backend"):
        support.require_receipts(config(executor="ray"))


def request(**changes: object) -> Request:
    fields = {
        "request_id": "chatcmpl-a-0123abcd",
        "prompt_token_ids": [5, 6, 7],
        "sampling_params": SamplingParams(temperature=0.5, top_k=-1, max_tokens=9),
        "pooling_params": None,
        **changes,
    }
    made = Request(**fields)
    made.append_output_token_ids([8, 70_000])
    return made


def test_ended_answer() -> None:
    made = request(lora_request=LoRARequest("an adapter", 1, "/no/where"))
    made.status = RequestStatus.FINISHED_LENGTH_CAPPED
    found = ended_answer(made, restricted=False)
    assert (found.prompt, found.output) == (
        b"\5\0\0\0\6\0\0\0\7\0\0\0",
        b"\x08\0\0\0" + (70_000).to_bytes(4, "little"),
    )
    assert (found.adapter, found.finish_reason) == ("an adapter", "length")
    assert found.sampling == Sampling(temperature=0.5)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, "stop"),
        (RequestStatus.FINISHED_ABORTED, "abort"),
        (RequestStatus.FINISHED_REPETITION, "repetition"),
        (RequestStatus.FINISHED_ERROR, "error"),
    ],
)
def test_reasons(status: RequestStatus, reason: str) -> None:
    made = request()
    made.status = status
    assert ended_answer(made, restricted=True).finish_reason == reason


def test_has_receipt() -> None:
    assert has_receipt(request())
    for changes in ({"resumable": True}, {"mm_features": [object()]}):
        assert not has_receipt(request(**changes))
    silent = request()
    silent._output_token_ids.clear()
    assert not has_receipt(silent)
    for field, value in (("sampling_params", None), ("prompt_embeds", object())):
        other = request()
        setattr(other, field, value)
        assert not has_receipt(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [5]},
        {"bad_words": ["no"]},
        {"min_tokens": 2},
        {"thinking_token_budget": 0},
        *([{"trace_decode_token_ids": [4]}] if since(0, 29) else []),
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
)
def test_what_restricts_the_choice_of_tokens(changes: dict[str, object]) -> None:
    assert sampling_of(SamplingParams(**changes)).restricted


def test_sampling_parameters() -> None:
    chosen = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "repetition_penalty": 1.1,
    }  # fmt: skip
    assert sampling_of(SamplingParams(**chosen)) == Sampling(**chosen)
    assert sampling_of(SamplingParams(stop=["x"], seed=3, logprobs=4)) == Sampling()
    assert sampling_of(SamplingParams(temperature=0.0, top_p=0.5)) == Sampling(temperature=0.0)
    assert sampling_of(SamplingParams(), restricted=True).restricted
