"""Names of vLLM that receipts rely on, of both model runners."""

from proofserve.engines.vllm.vetting.node_pins import CORE, GROUPS, RUNNER, SCHEDULER, SECOND_RUNNER
from proofserve.engines.vllm.vetting.pins import Feature, Pin

ANSWERS = "receipts.compat_answers.WatchedCore"
NOTES = "receipts.compat_outputs.RequestNotes"
TAP = "receipts.compat_tap"
CALLS = ("method", "timeout", "args", "kwargs", "non_block")

RECEIPTS = Feature(
    "receipts",
    (
        Pin("support.require_receipts", "vllm.config.vllm", "VllmConfig", ("speculative_config",)),
        Pin(
            "support.require_receipts",
            "vllm.config.parallel",
            "ParallelConfig",
            ("distributed_executor_backend",),
        ),
        Pin(f"{TAP}.has_rows", GROUPS, "GroupCoordinator", ("is_first_rank", "is_last_rank")),
        Pin(f"{TAP}.before_sampling", "vllm.v1.worker.gpu_worker", "Worker.sample_tokens"),
        Pin(f"{TAP}.before_sampling", "vllm.v1.worker.worker_base", "WorkerWrapperBase"),
        Pin(f"{TAP}._first_runner", RUNNER, "GPUModelRunner.sample_tokens"),
        Pin(f"{TAP}._first_runner", RUNNER, "GPUModelRunner", ("execute_model_state",)),
        Pin(
            f"{TAP}._first_runner",
            RUNNER,
            "ExecuteModelState",
            ("sample_hidden_states", "scheduler_output"),
        ),
        Pin(
            f"{TAP}._first_runner",
            "vllm.v1.worker.gpu_input_batch",
            "InputBatch",
            ("num_computed_tokens_cpu", "req_ids", "num_reqs"),
        ),
        Pin(f"{TAP}._second_runner", SECOND_RUNNER, "GPUModelRunner.sample_tokens"),
        Pin(f"{TAP}._second_runner", SECOND_RUNNER, "GPUModelRunner", ("execute_model_state",)),
        Pin(
            f"{TAP}._second_runner",
            SECOND_RUNNER,
            "ExecuteModelState",
            ("input_batch", "hidden_states"),
        ),
        Pin(
            f"{TAP}._second_runner",
            "vllm.v1.worker.gpu.input_batch",
            "InputBatch",
            ("req_ids", "num_computed_tokens_np", "num_scheduled_tokens", "logits_indices"),
        ),
        Pin(
            f"{ANSWERS}.fetch_rows",
            "vllm.v1.executor.multiproc_executor",
            "MultiprocExecutor.collective_rpc",
            CALLS,
        ),
        Pin(
            f"{ANSWERS}.fetch_rows",
            "vllm.v1.executor.uniproc_executor",
            "UniProcExecutor.collective_rpc",
            CALLS,
        ),
        Pin(f"{ANSWERS}.fetch_rows", CORE, "EngineCore", ("model_executor",)),
        Pin(f"{ANSWERS}.unfinished", SCHEDULER, "Scheduler", ("requests",)),
        Pin(f"{ANSWERS}.watch", SCHEDULER, "Scheduler._free_request", ("request",)),
        Pin(f"{ANSWERS}.watch", CORE, "EngineCore.post_step"),
        Pin(f"{ANSWERS}.watch", CORE, "EngineCore.preprocess_add_request", ("request",)),
        Pin(f"{ANSWERS}.watch", "vllm.v1.engine", "EngineCoreRequest", ("external_req_id",)),
        Pin(
            f"{ANSWERS}.changes_logits", "vllm.config.model", "ModelConfig", ("logits_processors",)
        ),
        Pin(
            "receipts.compat_answers.ended_answer",
            "vllm.v1.request",
            "Request",
            (
                "request_id",
                "prompt_token_ids",
                "output_token_ids",
                "num_output_tokens",
                "sampling_params",
                "prompt_embeds",
                "mm_features",
                "resumable",
                "lora_request",
                "get_finished_reason",
            ),
        ),
        Pin(
            "receipts.compat_answers.sampling_of",
            "vllm.sampling_params",
            "SamplingParams",
            (
                "temperature",
                "top_p",
                "top_k",
                "min_p",
                "presence_penalty",
                "frequency_penalty",
                "repetition_penalty",
                "structured_outputs",
                "logit_bias",
                "allowed_token_ids",
                "bad_words",
                "min_tokens",
                "thinking_token_budget",
                "trace_decode_token_ids",
            ),
        ),
        Pin(
            NOTES,
            "vllm.v1.engine.output_processor",
            "OutputProcessor.add_request",
            ("request", "prompt", "parent_req"),
        ),
        Pin(
            NOTES,
            "vllm.v1.engine.output_processor",
            "OutputProcessor.process_outputs",
            ("engine_core_outputs",),
        ),
        Pin(NOTES, "vllm.v1.engine.output_processor", "OutputProcessor", ("request_states",)),
        Pin(NOTES, "vllm.v1.engine.output_processor", "OutputProcessorOutput", ("reqs_to_abort",)),
        Pin(NOTES, "vllm.v1.engine.output_processor", "RequestState", ("detokenizer",)),
        Pin(NOTES, "vllm.v1.engine.detokenizer", "IncrementalDetokenizer.num_output_tokens"),
        Pin(NOTES, "vllm.v1.engine.parallel_sampling", "ParentRequest", ("n",)),
    ),
)
