"""The vetted versions of vLLM, and its names on which we rely.

``make matrix`` runs every row of versions live (docs/versions.md). The names stand by the feature
that an operator loses without them: ``tests/contract`` checks each in every vetted version,
``start`` in the sources of any other.
"""

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

Runner = Literal["V1", "V2"]
MATRIX = "live on CPU by `make matrix`, contract tests"


@dataclass(frozen=True, slots=True)
class Vetting:
    """A minor version of vLLM, its model runners on which proofs ran, and how it was vetted."""

    minor: str
    runners: tuple[Runner, ...]
    how: str


# A row is added after `make matrix` has passed for it. docs/versions.md has the results.
VETTED = (
    Vetting("0.26", ("V1",), f"{MATRIX}, with torch 2.11"),
    Vetting("0.29", ("V1",), MATRIX),
    Vetting("0.30", ("V1",), MATRIX),
    Vetting("0.31", ("V1",), MATRIX),
    Vetting("0.32", ("V1", "V2"), f"{MATRIX}; on V1 every test of `make test`"),
    Vetting("0.33", ("V1", "V2"), f"{MATRIX}, with the libraries of 0.32's CPU build"),
)


def vetting_of(version: str) -> Vetting | None:
    """The row of a version such as ``0.32.1`` or ``0.32.0rc1+cpu``; None if it has none."""
    minor = re.match(r"\d+\.\d+", version)
    return next((row for row in VETTED if minor and row.minor == minor[0]), None)


@dataclass(frozen=True, slots=True)
class Name:
    """``name``, dotted, in a ``module`` of vLLM, or the module itself, and what it must have.

    ``has``: parameters of a function, or members of a class: methods, fields and attributes that
    its methods set on ``self``. Members that it inherits belong to the class they are defined in.
    """

    module: str
    name: str
    has: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """A name that our function ``used_by`` relies on, in the spelling of the newest version.

    ``feature``: what an operator loses without it; completes "needed by …".
    ``used_by``: ``module.function``, below ``engines.vllm``, ``engines`` or ``proofserve``.
    ``older``: what older versions have in its place, if that differs; they have all of it.
    ``oldest``: the same of versions before those.
    """

    feature: str
    used_by: str
    newest: Name
    older: tuple[Name, ...] = ()
    oldest: tuple[Name, ...] = ()

    @property
    def spellings(self) -> tuple[tuple[Name, ...], ...]:
        """A version has all names of one of them; the newest comes first."""
        return tuple(filter(None, ((self.newest,), self.older, self.oldest)))


# A feature, then our functions (with a colon), each with what it relies on: a module, names in it,
# and in brackets what each must have. "older" says what older versions have instead, all of it, and
# "oldest" what those before them have.
_TABLE: Final = """\
proofs
support:
  vllm.config.vllm VllmConfig(use_v2_model_runner)
  vllm.config.parallel ParallelConfig(data_parallel_size _api_process_count
      decode_context_parallel_size prefill_context_parallel_size)
  vllm.config.model ModelConfig(hf_text_config architecture)
  vllm.config.compilation CompilationConfig.is_custom_op_enabled(op)
  vllm.platforms current_platform
client.served_facts:
  vllm.config.model ModelConfig.get_hidden_size ModelConfig(model revision)
  vllm.config.load LoadConfig(download_dir)
client.served_kernels:
  vllm.config.model ModelConfig(dtype)
  vllm.config.cache CacheConfig(cache_dtype)
  vllm.config.parallel ParallelConfig(tensor_parallel_size)
  vllm.config.compilation CompilationConfig(custom_ops)
  vllm.platforms current_platform
  vllm.platforms.interface Platform.is_cpu Platform.get_device_name
compat_client.call_engine:
  vllm.v1.engine.async_llm AsyncLLM(engine_core)
  vllm.v1.engine.core_client AsyncMPClient._call_utility_async(method engine) MPClient(core_engines)
  vllm.v1.engine.exceptions EngineDeadError
plugin.general: vllm.v1.engine.core EngineCore EngineCoreProc._invoke_utility_method
compat_core.VllmCore.run_forward:
  vllm.v1.engine.core EngineCore.collective_rpc(method timeout args) EngineCore(scheduler
      vllm_config)
compat_core.VllmCore.layers:
  vllm.config.model ModelConfig(hf_text_config)
  vllm.config.parallel ParallelConfig(pipeline_parallel_size)
compat_core.VllmCore.max_sequences:
  vllm.config.scheduler SchedulerConfig(max_num_batched_tokens max_num_seqs)
compat_core.VllmCore.block_sizes:
  vllm.v1.core.sched.scheduler Scheduler(kv_cache_config kv_cache_manager)
  vllm.v1.kv_cache_interface KVCacheConfig(kv_cache_groups) KVCacheGroupSpec(kv_cache_spec
      layer_names) AttentionSpec KVCacheSpec(block_size) UniformTypeKVCacheSpecs
compat_core.VllmCore.take_blocks:
  vllm.v1.core.kv_cache_manager KVCacheManager(block_pool)
  vllm.v1.core.block_pool BlockPool.get_new_blocks(num_blocks)
compat_core.VllmCore.return_blocks: vllm.v1.core.block_pool BlockPool.free_blocks(ordered_blocks)
compat_core.VllmCore.free_blocks: vllm.v1.core.block_pool BlockPool.get_num_free_blocks
worker.run_forward: vllm.v1.worker.gpu_model_runner GPUModelRunner.get_model
compat_worker.attention_metadata:
  vllm.v1.worker.gpu_model_runner GPUModelRunner(attn_groups kv_cache_config model_config device
      vllm_config)
  vllm.v1.worker.utils AttentionGroup(layer_names kv_cache_group_id)
      AttentionGroup.build_metadata(common_attn_metadata)
  older vllm.v1.worker.utils AttentionGroup.get_metadata_builder AttentionGroup(kv_cache_spec)
  older vllm.v1.attention.backend AttentionMetadataBuilder.build(common_prefix_len
      common_attn_metadata)
  older vllm.v1.worker.gpu_model_runner GPUModelRunner(_kernel_block_sizes)
compat_worker.common_metadata:
  vllm.v1.attention.backend CommonAttentionMetadata(query_start_loc query_start_loc_cpu seq_lens
      seq_lens_cpu_upper_bound num_reqs num_actual_tokens max_query_len max_seq_len
      block_table_tensor slot_mapping causal is_prefilling positions)
compat_worker.call_model:
  vllm.forward_context set_forward_context(num_tokens slot_mapping skip_compiled)
      get_forward_context ForwardContext(moe_layer_index)
  vllm.v1.worker.gpu_model_runner GPUModelRunner(model lora_config)
  vllm.config.model ModelConfig(uses_mrope mrope_num_dims)
  older vllm.config.model ModelConfig(uses_mrope)
compat_worker.can_pause: vllm.model_executor.models.interfaces supports_pp
compat_worker.some_layers: vllm.distributed.parallel_state _PP get_pp_group
compat_worker.without_adapters:
  vllm.v1.worker.lora_model_runner_mixin LoRAModelRunnerMixin._set_active_loras(prompt_lora_mapping
      token_lora_mapping lora_requests)
compat_worker.step_stream:
  vllm.v1.worker.gpu.model_runner GPUModelRunner(main_stream model lora_config model_state
      attn_groups)
compat_worker.receive_stage:
  vllm.sequence IntermediateTensors
  vllm.distributed.parallel_state GroupCoordinator.recv_tensor_dict(all_gather_group)
compat_worker.send_stage:
  vllm.distributed.parallel_state GroupCoordinator.send_tensor_dict(tensor_dict all_gather_group)
      GroupCoordinator(is_first_rank is_last_rank) get_pp_group get_tp_group

chat before proofs
compat_core.VllmCore.is_busy:
  vllm.v1.engine.core EngineCoreProc.has_work
  vllm.v1.core.sched.scheduler Scheduler.get_num_unfinished_requests
  vllm.v1.core.sched.interface SchedulerInterface.has_unfinished_requests
compat_core.VllmCore.waiting_requests: vllm.v1.engine EngineCoreRequestType(ADD UTILITY)
compat_core.VllmCore.delayed: vllm.v1.core.sched.scheduler Scheduler(requests)
compat_core.make_span: vllm.v1.request Request(trace_headers)
compat_core.VllmCore.await_message: vllm.v1.engine.core EngineCoreProc(input_queue)
compat_core.VllmCore.call_when_idle:
  vllm.v1.engine.core EngineCore(_idle_state_callbacks) EngineCoreProc._notify_idle_state_callbacks
compat_core.VllmCore.watch:
  vllm.v1.engine.core EngineCore.preprocess_add_request(request) EngineCore(step_fn)

the start and the orderly end of a server
wiring.launch:
  vllm.entrypoints.launchers.api_server.entry main
  oldest vllm.entrypoints.openai.api_server run_server(args)
compat_client.ServerStopping:
  vllm.exceptions GracefulHTTPError
  oldest vllm.v1.engine.exceptions EngineDeadError
  vllm.exceptions GenerationError
  oldest vllm.entrypoints.openai.engine.protocol GenerationError
compat_client.install_orderly_shutdown:
  vllm.v1.engine.async_llm AsyncLLM.shutdown(timeout) AsyncLLM(output_processor)
  vllm.v1.engine.output_processor OutputProcessor.propagate_error(e)
plugin.endpoint:
  vllm.entrypoints.launchers.launcher NoSignalServer
  oldest vllm.entrypoints.launcher serve_http(app sock)

noticing an engine that hangs
compat_core.VllmCore.watch:
  vllm.v1.engine.core EngineCore(step_fn) EngineCore.step EngineCore.step_with_batch_queue
compat_core.VllmCore.known_requests: vllm.v1.core.sched.scheduler Scheduler(requests)
compat_client.unfinished_by_core:
  vllm.v1.engine.output_processor OutputProcessor(request_states)
  vllm.v1.engine.async_llm AsyncLLM(engine_core output_processor)
  vllm.v1.engine.core_client DPLBAsyncMPClient(reqs_in_flight)

receipts
support.require_receipts:
  vllm.config.vllm VllmConfig(speculative_config)
  vllm.config.parallel ParallelConfig(distributed_executor_backend)
receipts.compat_answers.start_tap:
  vllm.distributed.parallel_state GroupCoordinator(is_first_rank is_last_rank)
receipts.compat_answers.before_sampling:
  vllm.v1.worker.gpu_worker Worker.sample_tokens
  vllm.v1.worker.worker_base WorkerWrapperBase
receipts.compat_answers._first_runner:
  vllm.v1.worker.gpu_model_runner GPUModelRunner.sample_tokens GPUModelRunner(execute_model_state)
      ExecuteModelState(sample_hidden_states scheduler_output)
  vllm.v1.worker.gpu_input_batch InputBatch(num_computed_tokens_cpu req_ids num_reqs)
receipts.compat_answers._second_runner:
  vllm.v1.worker.gpu.model_runner GPUModelRunner.sample_tokens GPUModelRunner(execute_model_state)
      ExecuteModelState(input_batch hidden_states)
  vllm.v1.worker.gpu.input_batch InputBatch(req_ids num_computed_tokens_np num_scheduled_tokens
      logits_indices)
receipts.compat_answers.WatchedCore.fetch_rows:
  vllm.v1.executor.multiproc_executor MultiprocExecutor.collective_rpc(method timeout args kwargs
      non_block)
  vllm.v1.executor.uniproc_executor UniProcExecutor.collective_rpc(method timeout args kwargs
      non_block)
  vllm.v1.engine.core EngineCore(model_executor)
receipts.compat_answers.WatchedCore.unfinished: vllm.v1.core.sched.scheduler Scheduler(requests)
receipts.compat_answers.WatchedCore.watch:
  vllm.v1.core.sched.scheduler Scheduler._free_request(request)
  vllm.v1.engine.core EngineCore.post_step EngineCore.preprocess_add_request(request)
  vllm.v1.engine EngineCoreRequest(external_req_id)
receipts.compat_answers.WatchedCore.changes_logits: vllm.config.model ModelConfig(logits_processors)
receipts.compat_answers.ended_answer:
  vllm.v1.request Request(request_id prompt_token_ids output_token_ids num_output_tokens
      sampling_params prompt_embeds mm_features resumable lora_request get_finished_reason)
receipts.compat_answers.sampling_of:
  vllm.sampling_params SamplingParams(temperature top_p top_k min_p presence_penalty
      frequency_penalty repetition_penalty structured_outputs logit_bias allowed_token_ids bad_words
      min_tokens thinking_token_budget)
receipts.compat_answers.RequestNotes:
  vllm.v1.engine.output_processor OutputProcessor.add_request(request prompt parent_req)
      OutputProcessor.process_outputs(engine_core_outputs) OutputProcessor(request_states)
      OutputProcessorOutput(reqs_to_abort) RequestState(detokenizer)
  vllm.v1.engine.detokenizer IncrementalDetokenizer.num_output_tokens
  vllm.v1.engine.parallel_sampling ParentRequest(n)

the embedded engine
compat_server.server_arguments:
  vllm.entrypoints.common.cli_args make_arg_parser(parser)
  older vllm.entrypoints.launchers.cli_args make_arg_parser(parser)
  oldest vllm.entrypoints.openai.cli_args make_arg_parser(parser)
  vllm.entrypoints.common.cli_args validate_parsed_serve_args(args)
  older vllm.entrypoints.launchers.cli_args validate_parsed_serve_args(args)
  oldest vllm.entrypoints.openai.cli_args validate_parsed_serve_args(args)
  vllm.entrypoints.common.cli_args validate_api_server_args(args)
  older vllm.entrypoints.launchers.launcher validate_api_server_args(args)
  oldest vllm.entrypoints.openai.api_server validate_api_server_args(args)
  vllm.entrypoints.common.startup cli_env_setup
  older vllm.entrypoints.serve.utils.api_utils cli_env_setup
  vllm.logger configure_logging_from_args(args)
  older vllm.logger _configure_vllm_root_logger
  vllm.utils.argparse_utils FlexibleArgumentParser
  vllm.reasoning ReasoningParserManager
  vllm.tool_parsers ToolParserManager
compat_server.running_app:
  vllm.entrypoints.launchers.api_server.entry build_async_engine_client(args)
  oldest vllm.entrypoints.openai.api_server build_async_engine_client(args)
  vllm.v1.engine.async_llm AsyncLLM.get_supported_tasks
  vllm.entrypoints.launchers.app build_app(args supported_tasks model_config)
  oldest vllm.entrypoints.openai.api_server build_app(args supported_tasks model_config)
  vllm.entrypoints.launchers.api_server.app_state init_app_state(engine_client state args
      supported_tasks)
  oldest vllm.entrypoints.openai.api_server init_app_state(engine_client state args
      supported_tasks)

several API server processes
compat_server.serve_by_several_processes:
  vllm.entrypoints.cli.serve ServeSubcommand.subparser_init(subparsers)
      ServeSubcommand.validate(args) ServeSubcommand.cmd(args)
  vllm.utils.argparse_utils FlexibleArgumentParser

proofs on vLLM's class LLM
compat_client.call_engine_sync:
  vllm.v1.engine.core_client InprocClient(engine_core) SyncMPClient.call_utility(method)
inprocess.SyncProver: vllm.v1.engine.llm_engine LLMEngine(engine_core)
"""
_WORDS: Final = re.compile(
    r"(?P<function>\S+):|(?P<age>older |oldest )?(?P<module>vllm\.\S+)"
    r"|(?P<name>[\w.]+)(\((?P<has>[^)]*)\))?"
)


def _pins(section: str) -> tuple[Pin, ...]:
    feature, _, rows = section.partition("\n")
    pins: list[Pin] = []
    function, module, age = "", "", ""
    for word in _WORDS.finditer(rows):
        if word["function"]:
            function = word["function"]
        elif word["module"]:
            module, age = word["module"], (word["age"] or "").strip()
        else:
            name = Name(module, word["name"], tuple((word["has"] or "").split()))
            if age == "older":
                pins[-1] = replace(pins[-1], older=(*pins[-1].older, name))
            elif age == "oldest":
                pins[-1] = replace(pins[-1], oldest=(*pins[-1].oldest, name))
            else:
                pins.append(Pin(feature, function, name))
    return tuple(pins)


_FEATURES: Final = tuple(map(_pins, _TABLE.split("\n\n")))
PROOFS, CHAT_FIRST, ORDERLY_END, LIVENESS, RECEIPTS, EMBEDDED, SEVERAL, OFFLINE = _FEATURES
ALL: Final = tuple(chain.from_iterable(_FEATURES))


def of_node(receipts: bool) -> tuple[Pin, ...]:
    """What a server with proofs needs, with or without receipts."""
    return (*PROOFS, *CHAT_FIRST, *ORDERLY_END, *LIVENESS, *(RECEIPTS if receipts else ()))
