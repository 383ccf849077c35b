"""Names of vLLM of single deployments: an engine in the caller's process, several API processes."""

from proofserve.engines.vllm.vetting.node_pins import CORE_CLIENT, LAUNCHER
from proofserve.engines.vllm.vetting.pins import Feature, Name, Pin

ARGUMENTS = "compat_server.server_arguments"
APPLICATION = "compat_server.running_app"
ENTRY = "vllm.entrypoints.launchers.api_server.entry"
CLI_ARGS = "vllm.entrypoints.common.cli_args"
CLI_ARGS_UNTIL_0_32 = "vllm.entrypoints.launchers.cli_args"

EMBEDDED = Feature(
    "the embedded engine",
    (
        Pin(
            ARGUMENTS,
            CLI_ARGS,
            "make_arg_parser",
            ("parser",),
            older=(Name(CLI_ARGS_UNTIL_0_32, "make_arg_parser", ("parser",)),),
        ),
        Pin(
            ARGUMENTS,
            CLI_ARGS,
            "validate_parsed_serve_args",
            ("args",),
            older=(Name(CLI_ARGS_UNTIL_0_32, "validate_parsed_serve_args", ("args",)),),
        ),
        Pin(
            ARGUMENTS,
            CLI_ARGS,
            "validate_api_server_args",
            ("args",),
            older=(Name(LAUNCHER, "validate_api_server_args", ("args",)),),
        ),
        Pin(
            ARGUMENTS,
            "vllm.entrypoints.common.startup",
            "cli_env_setup",
            older=(Name("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup"),),
        ),
        # Until 0.30 logging is configured when vLLM is imported.
        Pin(
            ARGUMENTS,
            "vllm.logger",
            "configure_logging_from_args",
            ("args",),
            older=(Name("vllm.logger", "_configure_vllm_root_logger"),),
        ),
        Pin(ARGUMENTS, "vllm.utils.argparse_utils", "FlexibleArgumentParser"),
        Pin(ARGUMENTS, "vllm.reasoning", "ReasoningParserManager"),
        Pin(ARGUMENTS, "vllm.tool_parsers", "ToolParserManager"),
        Pin(APPLICATION, ENTRY, "build_async_engine_client", ("args",)),
        Pin(APPLICATION, "vllm.v1.engine.async_llm", "AsyncLLM.get_supported_tasks"),
        Pin(
            APPLICATION,
            "vllm.entrypoints.launchers.app",
            "build_app",
            ("args", "supported_tasks", "model_config"),
        ),
        Pin(
            APPLICATION,
            "vllm.entrypoints.launchers.api_server.app_state",
            "init_app_state",
            ("engine_client", "state", "args", "supported_tasks"),
        ),
    ),
)

SERVE = "parallel.compat_serve.main"
SEVERAL = Feature(
    "several API server processes",
    (
        Pin(SERVE, "vllm.entrypoints.cli.serve", "ServeSubcommand.subparser_init", ("subparsers",)),
        Pin(SERVE, "vllm.entrypoints.cli.serve", "ServeSubcommand.validate", ("args",)),
        Pin(SERVE, "vllm.entrypoints.cli.serve", "ServeSubcommand.cmd", ("args",)),
        Pin(SERVE, "vllm.utils.argparse_utils", "FlexibleArgumentParser"),
    ),
)

OFFLINE = Feature(
    "proofs on vLLM's class LLM",
    (
        Pin("compat_client.call_engine_sync", CORE_CLIENT, "InprocClient", ("engine_core",)),
        Pin(
            "compat_client.call_engine_sync", CORE_CLIENT, "SyncMPClient.call_utility", ("method",)
        ),
        Pin("inprocess.SyncProver", "vllm.v1.engine.llm_engine", "LLMEngine", ("engine_core",)),
    ),
)
