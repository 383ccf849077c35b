"""Names of vLLM that every node relies on: proofs, chat before proofs, and an orderly end."""

from proofserve.engines.vllm.vetting.pins import Feature, Name, Pin

CORE = "vllm.v1.engine.core"
CORE_CLIENT = "vllm.v1.engine.core_client"
SCHEDULER = "vllm.v1.core.sched.scheduler"
RUNNER = "vllm.v1.worker.gpu_model_runner"
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
GROUPS = "vllm.distributed.parallel_state"
LAUNCHER = "vllm.entrypoints.launchers.launcher"

PROOFS = Feature(
    "proofs",
    (
        Pin("support", "vllm.config.vllm", "VllmConfig", ("use_v2_model_runner",)),
        Pin(
            "support",
            "vllm.config.parallel",
            "ParallelConfig",
            (
                "data_parallel_size",
                "_api_process_count",
                "decode_context_parallel_size",
                "prefill_context_parallel_size",
            ),
        ),
        Pin("support", "vllm.config.model", "ModelConfig", ("hf_text_config",)),
        Pin(
            "support", "vllm.config.compilation", "CompilationConfig.is_custom_op_enabled", ("op",)
        ),
        Pin("support", "vllm.platforms", "current_platform"),
        Pin("client.served_facts", "vllm.config.model", "ModelConfig.get_hidden_size"),
        Pin("client.served_facts", "vllm.config.model", "ModelConfig", ("model", "revision")),
        Pin("client.served_facts", "vllm.config.load", "LoadConfig", ("download_dir",)),
        Pin("client.served_kernels", "vllm.config.model", "ModelConfig", ("dtype",)),
        Pin("client.served_kernels", "vllm.config.cache", "CacheConfig", ("cache_dtype",)),
        Pin(
            "client.served_kernels",
            "vllm.config.parallel",
            "ParallelConfig",
            ("tensor_parallel_size",),
        ),
        Pin("client.served_kernels", "vllm.platforms", "current_platform"),
        Pin("client.served_kernels", "vllm.platforms.interface", "Platform.is_cpu"),
        Pin("client.served_kernels", "vllm.platforms.interface", "Platform.get_device_name"),
        Pin("compat_client.call_engine", "vllm.v1.engine.async_llm", "AsyncLLM", ("engine_core",)),
        Pin(
            "compat_client.call_engine",
            CORE_CLIENT,
            "AsyncMPClient._call_utility_async",
            ("method", "engine"),
        ),
        Pin("compat_client.call_engine", CORE_CLIENT, "MPClient", ("core_engines",)),
        Pin("compat_client.call_engine", "vllm.v1.engine.exceptions", "EngineDeadError"),
        Pin("plugin.general", CORE, "EngineCore"),
        Pin("plugin.general", CORE, "EngineCoreProc._invoke_utility_method"),
        Pin(
            "compat_core.VllmCore.run_forward",
            CORE,
            "EngineCore.collective_rpc",
            ("method", "timeout", "args"),
        ),
        Pin("compat_core.VllmCore.run_forward", CORE, "EngineCore", ("scheduler", "vllm_config")),
        Pin(
            "compat_core.VllmCore.max_sequences",
            "vllm.config.scheduler",
            "SchedulerConfig",
            ("max_num_batched_tokens", "max_num_seqs"),
        ),
        Pin(
            "compat_core.VllmCore.block_sizes",
            SCHEDULER,
            "Scheduler",
            ("kv_cache_config", "kv_cache_manager"),
        ),
        Pin(
            "compat_core.VllmCore.block_sizes",
            "vllm.v1.kv_cache_interface",
            "KVCacheConfig",
            ("kv_cache_groups",),
        ),
        Pin(
            "compat_core.VllmCore.block_sizes",
            "vllm.v1.kv_cache_interface",
            "KVCacheGroupSpec",
            ("kv_cache_spec", "layer_names"),
        ),
        Pin("compat_core.VllmCore.block_sizes", "vllm.v1.kv_cache_interface", "AttentionSpec"),
        Pin(
            "compat_core.VllmCore.block_sizes",
            "vllm.v1.kv_cache_interface",
            "KVCacheSpec",
            ("block_size",),
        ),
        Pin(
            "compat_core.VllmCore.block_sizes",
            "vllm.v1.kv_cache_interface",
            "UniformTypeKVCacheSpecs",
        ),
        Pin(
            "compat_core.VllmCore.take_blocks",
            "vllm.v1.core.kv_cache_manager",
            "KVCacheManager",
            ("block_pool",),
        ),
        Pin(
            "compat_core.VllmCore.take_blocks",
            "vllm.v1.core.block_pool",
            "BlockPool.get_new_blocks",
            ("num_blocks",),
        ),
        Pin(
            "compat_core.VllmCore.return_blocks",
            "vllm.v1.core.block_pool",
            "BlockPool.free_blocks",
            ("ordered_blocks",),
        ),
        Pin(
            "compat_core.VllmCore.free_blocks",
            "vllm.v1.core.block_pool",
            "BlockPool.get_num_free_blocks",
        ),
        Pin("worker.run_forward", RUNNER, "GPUModelRunner.get_model"),
        Pin(
            "compat_worker.attention_metadata",
            RUNNER,
            "GPUModelRunner",
            ("attn_groups", "kv_cache_config", "model_config", "device", "vllm_config"),
        ),
        Pin(
            "compat_worker.attention_metadata",
            "vllm.v1.worker.utils",
            "AttentionGroup",
            ("layer_names", "kv_cache_group_id"),
        ),
        Pin(
            "compat_worker.attention_metadata",
            "vllm.v1.worker.utils",
            "AttentionGroup.build_metadata",
            ("common_attn_metadata",),
            older=(
                Name("vllm.v1.worker.utils", "AttentionGroup.get_metadata_builder"),
                Name("vllm.v1.worker.utils", "AttentionGroup", ("kv_cache_spec",)),
                Name(
                    "vllm.v1.attention.backend",
                    "AttentionMetadataBuilder.build",
                    ("common_prefix_len", "common_attn_metadata"),
                ),
                Name(RUNNER, "GPUModelRunner", ("_kernel_block_sizes",)),
            ),
        ),
        Pin(
            "compat_worker.common_metadata",
            "vllm.v1.attention.backend",
            "CommonAttentionMetadata",
            (
                "query_start_loc",
                "query_start_loc_cpu",
                "seq_lens",
                "seq_lens_cpu_upper_bound",
                "num_reqs",
                "num_actual_tokens",
                "max_query_len",
                "max_seq_len",
                "block_table_tensor",
                "slot_mapping",
                "causal",
                "is_prefilling",
                "positions",
            ),
        ),
        Pin(
            "compat_worker.call_model",
            "vllm.forward_context",
            "set_forward_context",
            ("num_tokens", "slot_mapping", "skip_compiled"),
        ),
        Pin("compat_worker.call_model", RUNNER, "GPUModelRunner", ("model", "lora_config")),
        Pin(
            "compat_worker.call_model",
            "vllm.config.model",
            "ModelConfig",
            ("uses_mrope", "mrope_num_dims"),
            older=(Name("vllm.config.model", "ModelConfig", ("uses_mrope",)),),
        ),
        Pin(
            "compat_worker.without_adapters",
            "vllm.v1.worker.lora_model_runner_mixin",
            "LoRAModelRunnerMixin._set_active_loras",
            ("prompt_lora_mapping", "token_lora_mapping", "lora_requests"),
        ),
        Pin(
            "compat_worker.step_stream",
            SECOND_RUNNER,
            "GPUModelRunner",
            ("main_stream", "model", "lora_config", "model_state", "attn_groups"),
        ),
        Pin("compat_worker.receive_stage", "vllm.sequence", "IntermediateTensors"),
        Pin(
            "compat_worker.receive_stage",
            GROUPS,
            "GroupCoordinator.recv_tensor_dict",
            ("all_gather_group",),
        ),
        Pin(
            "compat_worker.send_stage",
            GROUPS,
            "GroupCoordinator.send_tensor_dict",
            ("tensor_dict", "all_gather_group"),
        ),
        Pin(
            "compat_worker.send_stage",
            GROUPS,
            "GroupCoordinator",
            ("is_first_rank", "is_last_rank"),
        ),
        Pin("compat_worker.send_stage", GROUPS, "get_pp_group"),
        Pin("compat_worker.send_stage", GROUPS, "get_tp_group"),
    ),
)

CHAT_FIRST = Feature(
    "chat before proofs",
    (
        Pin("compat_core.VllmCore.is_busy", CORE, "EngineCoreProc.has_work"),
        Pin("compat_core.VllmCore.is_busy", SCHEDULER, "Scheduler.get_num_unfinished_requests"),
        Pin(
            "compat_core.VllmCore.is_busy",
            "vllm.v1.core.sched.interface",
            "SchedulerInterface.has_unfinished_requests",
        ),
        Pin(
            "compat_core.VllmCore.waiting_requests",
            "vllm.v1.engine",
            "EngineCoreRequestType",
            ("ADD", "UTILITY"),
        ),
        Pin("compat_core.VllmCore.await_message", CORE, "EngineCoreProc", ("input_queue",)),
        Pin("compat_core.VllmCore.call_when_idle", CORE, "EngineCore", ("_idle_state_callbacks",)),
        Pin(
            "compat_core.VllmCore.call_when_idle",
            CORE,
            "EngineCoreProc._notify_idle_state_callbacks",
        ),
        Pin("compat_core.VllmCore.watch", CORE, "EngineCore.preprocess_add_request", ("request",)),
        Pin("compat_core.VllmCore.watch", CORE, "EngineCore", ("step_fn",)),
    ),
)

ORDERLY_END = Feature(
    "the start and the orderly end of a server",
    (
        Pin("wiring.launch", "vllm.entrypoints.launchers.api_server.entry", "main"),
        Pin("compat_client.ServerStopping", "vllm.exceptions", "GracefulHTTPError"),
        Pin("compat_client.ServerStopping", "vllm.exceptions", "GenerationError"),
        Pin(
            "compat_client.install_orderly_shutdown",
            "vllm.v1.engine.async_llm",
            "AsyncLLM.shutdown",
            ("timeout",),
        ),
        Pin(
            "compat_client.install_orderly_shutdown",
            "vllm.v1.engine.async_llm",
            "AsyncLLM",
            ("output_processor",),
        ),
        Pin(
            "compat_client.install_orderly_shutdown",
            "vllm.v1.engine.output_processor",
            "OutputProcessor.propagate_error",
            ("e",),
        ),
        Pin("plugin.endpoint", LAUNCHER, "NoSignalServer"),
    ),
)
