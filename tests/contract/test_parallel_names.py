"""Pins vLLM's names that data parallel cores and several API processes rely on."""

import importlib
import inspect
import re
from types import SimpleNamespace

import pytest
from vllm.config import ModelConfig, ParallelConfig
from vllm.entrypoints.cli import main, serve
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.v1 import utils
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient, MPClient
from vllm.v1.engine.utils import CoreEngine

from proofserve.engines.vllm import support
from support.contract import in_order, parameters, since, source


def config(data_parallel: int = 1, processes: int = 1, is_moe: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            data_parallel_size=data_parallel,
            _api_process_count=processes,
            distributed_executor_backend="mp",
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            is_moe=is_moe, hf_text_config=SimpleNamespace(), hf_config=SimpleNamespace()
        ),
        speculative_config=None,
    )


def test_data_parallel_of_dense_models_is_served_and_of_experts_refused() -> None:
    support.require_supported_options(config(data_parallel=2, processes=3))
    support.require_supported_options(config(is_moe=True))
    with pytest.raises(support.UnsupportedEngine, match=r"--data-parallel-size 2.*group_id"):
        support.require_supported_options(config(data_parallel=2, is_moe=True))
    assert isinstance(inspect.getattr_static(ModelConfig, "is_moe"), property)


def test_receipts_need_one_api_process_and_any_number_of_cores() -> None:
    support.require_receipts(config(data_parallel=2))
    with pytest.raises(ValueError, match=r"3 API server processes.*--api-server-count 1"):
        support.require_receipts(config(processes=3))


def test_api_processes() -> None:
    assert support.api_processes(config(processes=3)) == 3
    assert "_api_process_count" in {f.name for f in ParallelConfig.__dataclass_fields__.values()}


def test_data_parallel_cores_of_dense_models_are_independent() -> None:
    """What ``support.require_supported_options`` relies on."""
    start = source(EngineCoreProc.run_engine_core)
    choice = start[start.index("if data_parallel and vllm_config.model_config.is_moe:") :]
    moe, dense = choice[: choice.index("else:")], choice[choice.index("else:") :]
    assert "engine_core = DPEngineCoreProc(" in moe
    alone = "reconfigure_for_independent_dp_rank()" if since(0, 29) else "data_parallel_size = 1"
    assert alone in dense
    assert "engine_core = EngineCoreProc(" in dense


def test_one_core_is_called_by_its_place_in_the_order_of_ranks() -> None:
    """What ``compat_client.call_engine`` and ``core_count`` rely on."""
    assert parameters(AsyncMPClient._call_utility_async) == ["self", "method", "args", "engine"]
    assert "_call_utility_async" not in vars(DPLBAsyncMPClient)
    made = source(MPClient.__init__)
    assert "rank.to_bytes(2, " in made
    assert re.search(r"self\.core_engines: list\[\w+\] = \[", made)
    assert CoreEngine(1).identity == (1).to_bytes(2, "little")
    # The reply goes to the process that asked.
    assert "(self.client_index, call_id, method, args)" in source(AsyncMPClient._call_utility_async)


def test_serve_with_several_api_processes() -> None:
    """What ``compat_server.serve_by_several_processes`` relies on."""
    assert parameters(ServeSubcommand.subparser_init) == ["self", "subparsers"]
    assert parameters(ServeSubcommand.validate) == ["self", "args"]
    assert parameters(ServeSubcommand.cmd) == ["args"]
    # Until 0.30 logging is configured when vLLM is imported.
    logs = ["configure_logging_from_args(args)"] if since(0, 31) else []
    steps = (" cli_env_setup()", *logs, ".validate(args)", "args.dispatch_function(args)")
    assert in_order(source(main.main), *steps)
    assert "elif args.api_server_count > 1 or " in source(ServeSubcommand.cmd)


def test_the_server_ends_when_an_api_process_is_killed_and_not_when_one_ends_in_order() -> None:
    """What docs/operations.md says about the processes of a server."""
    waiting = source(utils.wait_for_completion_or_failure)
    assert "if proc is not None and proc.exitcode != 0:" in waiting
    assert "while sentinel_to_proc:" in waiting
    assert 'get_context("spawn")' in source(utils.APIServerProcessManager.__init__)
    ending = source(serve.run_multi_api_server)
    assert "timeout = vllm_config.shutdown_timeout" in ending
    assert "api_server_manager.shutdown(timeout=timeout)" in ending


def test_a_route_that_is_no_api_route_keeps_its_place_before_those_of_the_plugin() -> None:
    """What ``plugin.endpoint`` relies on for the route that passes calls on."""
    if since(0, 29):
        interface = importlib.import_module("vllm.plugins.endpoint_plugins.interface")
        attach = source(interface.attach_endpoint_plugins)
    else:
        server = importlib.import_module("vllm.entrypoints.openai.api_server")
        attach = source(server._attach_endpoint_plugins)
    # Until 0.31 vLLM moves no route.
    assert ("not isinstance(route, APIRoute)" in attach) == since(0, 32)
    assert since(0, 32) or "app.routes" not in attach
