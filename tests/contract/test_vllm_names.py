"""Pins every private name of vLLM that the adapter relies on, and names the caller.

A failure here after an upgrade says which function of ``engines/vllm/compat_*.py`` to revisit.
"""

import dataclasses
import inspect
import queue
from types import SimpleNamespace

import prometheus_client
import pytest
import uvicorn
import vllm
from fastapi import FastAPI
from fastapi.routing import APIRoute
from vllm import logger
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.utils import server_utils
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.exception_handling.handlers import vllm_error
from vllm.entrypoints.serve.instrumentator import metrics
from vllm.exceptions import GenerationError, RetryableRequestError
from vllm.forward_context import set_forward_context
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, InprocClient, MPClient, SyncMPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import AttentionGroup

from proofserve.engines.vllm import support


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_installed_version_is_a_tested_one() -> None:
    assert support.require_tested_version() == vllm.__version__


def test_another_version_is_refused_with_the_tested_ones_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    with pytest.raises(support.UnsupportedEngine, match=r"0\.99\.0.*tested: 0\.32\.x"):
        support.require_tested_version()


def config(data_parallel: int = 1, api_processes: int = 1) -> SimpleNamespace:
    parallel = SimpleNamespace(data_parallel_size=data_parallel, _api_process_count=api_processes)
    return SimpleNamespace(parallel_config=parallel, use_v2_model_runner=False)


def test_a_split_deployment_is_refused_with_the_way_out() -> None:
    support.require_supported_options(config())
    with pytest.raises(support.UnsupportedEngine, match=r"data parallel size 2.*group_id"):
        support.require_supported_options(config(data_parallel=2))
    with pytest.raises(support.UnsupportedEngine, match=r"3 API server.*--api-server-count 1"):
        support.require_supported_options(config(api_processes=3))
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    assert {"data_parallel_size", "_api_process_count"} <= fields


def test_the_second_model_runner_is_refused() -> None:
    with pytest.raises(support.UnsupportedEngine, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        support.require_supported_options(SimpleNamespace(use_v2_model_runner=True))
    assert "use_v2_model_runner" in dir(VllmConfig)


def test_call_engine_and_call_engine_sync() -> None:
    assert parameters(AsyncMPClient.call_utility_async)[:2] == ["self", "method"]
    assert parameters(SyncMPClient.call_utility)[:2] == ["self", "method"]
    assert "self.engine_core = EngineCore(" in source(InprocClient.__init__)


def test_utility_calls_may_answer_with_a_future() -> None:
    body = source(EngineCoreProc._invoke_utility_method)
    assert "isinstance(result, Future)" in body
    assert "add_done_callback" in body


def test_call_when_idle_and_post_wakeup() -> None:
    assert "self._idle_state_callbacks: list[Callable] = []" in source(EngineCore.__init__)
    loop = source(EngineCoreProc._process_input_queue)
    assert loop.index("_notify_idle_state_callbacks") < loop.index("self.input_queue.get(")
    assert "client_idx, call_id, method_name, args = request" in source(
        EngineCoreProc._handle_client_request
    )
    assert EngineCoreRequestType.UTILITY


def test_await_message() -> None:
    assert "self.input_queue = queue.Queue[" in source(EngineCoreProc.__init__)
    assert {"not_empty", "queue"} <= set(vars(queue.Queue()))


def test_waiting_requests_and_is_busy() -> None:
    assert "req, request_wave = request" in source(EngineCoreProc._handle_client_request)
    assert "scheduler.has_requests()" in source(EngineCoreProc.has_work)


def test_watch() -> None:
    assert "self.preprocess_add_request(req)" in source(EngineCoreProc.process_input_sockets)
    assert "self.step_fn()" in source(EngineCoreProc._process_engine_step)
    assert "self.step_fn = (" in source(EngineCore.__init__)


def test_run_forward() -> None:
    assert parameters(EngineCore.collective_rpc) == ["self", "method", "timeout", "args", "kwargs"]


def test_take_return_and_free_blocks() -> None:
    assert parameters(BlockPool.get_new_blocks) == ["self", "num_blocks"]
    assert parameters(BlockPool.free_blocks) == ["self", "ordered_blocks"]
    assert parameters(BlockPool.get_num_free_blocks) == ["self"]
    assert "raise ValueError" in source(BlockPool.get_new_blocks)


def test_common_metadata() -> None:
    fields = {field.name: field for field in dataclasses.fields(CommonAttentionMetadata)}
    given = {
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound",
        "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
        "slot_mapping", "causal", "is_prefilling", "positions",
    }  # fmt: skip
    required = {n for n, f in fields.items() if f.default is dataclasses.MISSING}
    assert required <= given <= set(fields)


def test_attention_metadata() -> None:
    assert parameters(AttentionGroup.build_metadata)[:2] == ["self", "common_attn_metadata"]
    assert {"layer_names", "kv_cache_group_id"} <= {
        field.name for field in dataclasses.fields(AttentionGroup)
    }
    assert "self.attn_groups" in source(GPUModelRunner._build_attention_metadata)


def test_call_model() -> None:
    assert {"num_tokens", "slot_mapping", "skip_compiled"} <= set(parameters(set_forward_context))
    assert parameters(GPUModelRunner._model_forward)[1:5] == [
        "input_ids", "positions", "intermediate_tensors", "inputs_embeds",
    ]  # fmt: skip
    assert {"use_aux_hidden_state_outputs", "uses_mrope"} <= set(
        source(GPUModelRunner).replace("self.", " ").replace(":", " ").split()
    )


def test_pipeline_stages() -> None:
    group = parallel_state.GroupCoordinator
    assert "all_gather_group" in parameters(group.send_tensor_dict)
    assert "all_gather_group" in parameters(group.recv_tensor_dict)
    assert parallel_state.get_pp_group
    assert parallel_state.get_tp_group


def in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)


def test_server_arguments() -> None:
    assert in_order(
        source(entry.main),
        "cli_env_setup()",
        "make_arg_parser(parser)",
        "configure_logging_from_args(args)",
        "validate_parsed_serve_args(args)",
    )
    assert in_order(
        source(launcher.setup_server),
        "ToolParserManager.import_tool_parser(args.tool_parser_plugin)",
        "ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)",
        "validate_api_server_args(args)",
    )


def test_running_app() -> None:
    assert in_order(source(server_utils.lifespan), "freeze_gc_heap()", "yield", "del app.state")


def test_running_engine() -> None:
    assert parameters(entry.build_async_engine_client)[0] == "args"
    assert parameters(AsyncLLM.shutdown) == ["self", "timeout"]
    # Orderly shutdown: from another thread, while the loop runs, before the HTTP server ends.
    assert in_order(
        source(launcher.serve_http),
        "loop.run_in_executor(",
        "partial(engine_client.shutdown, timeout=timeout)",
        "server_task.cancel()",
    )
    # A second stop finds nothing left to do.
    assert "if self._finalizer.detach() is not None:" in source(MPClient.shutdown)
    assert "add_signal_handler" not in source(entry)


def test_orderly_shutdown_ends_the_requests_that_wait_for_the_engine() -> None:
    assert parameters(OutputProcessor.propagate_error) == ["self", "e"]
    assert "state.queue.put(e)" in source(OutputProcessor.propagate_error)
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "a request")
    stopping = ValueError("the server stops")
    collector.put(stopping)
    collector.put(RequestOutput("a request", None, None, None, [], finished=True))
    assert collector.output is stopping
    assert "self.output_processor = OutputProcessor(" in source(AsyncLLM.__init__)
    assert "except (VLLMClientError, GracefulHTTPError) as e:" in source(AsyncLLM.generate)
    assert issubclass(RetryableRequestError, GenerationError)
    stream = source(OpenAIServingChat.chat_completion_stream_generator)
    assert "except GenerationError as e:" in stream
    # Without propagate_error nothing wakes them where the task that would is cancelled first.
    assert in_order(source(AsyncLLM.shutdown), "output_handler", "cancel_task_threadsafe(handler)")


def test_the_wait_for_clients_can_be_limited() -> None:
    # plugin.endpoint sets timeout_graceful_shutdown of app.state.server in the lifespan.
    assert issubclass(launcher.NoSignalServer, uvicorn.Server)
    assert in_order(
        source(launcher.serve_http),
        "server = NoSignalServer(config",
        "app.state.server = server",
        "server.serve(",
    )
    assert "timeout=self.config.timeout_graceful_shutdown" in source(uvicorn.Server.shutdown)


def test_application() -> None:
    assert in_order(
        source(entry.build_and_serve),
        "supported_tasks = await engine_client.get_supported_tasks()",
        "app = build_app(args, supported_tasks, model_config)",
        "await init_app_state(engine_client, app.state, args, supported_tasks)",
    )
    assert parameters(build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(init_app_state) == ["engine_client", "state", "args", "supported_tasks"]
    assert "server=req.app.state.server" in source(vllm_error.engine_error_handler)
    assert "server.should_exit = True" in source(launcher.terminate_if_errored)


def test_the_page_of_metrics_is_made_in_another_thread_from_the_default_registry() -> None:
    # api.metrics.NodeCollector waits for the loop, and plugin.endpoint registers it there.
    app = FastAPI()
    metrics.attach_router(app)
    (route,) = [each for each in app.routes if isinstance(each, APIRoute)]
    assert route.path == "/metrics"
    assert not inspect.iscoroutinefunction(route.endpoint)
    assert metrics.get_prometheus_registry() is prometheus_client.REGISTRY


def test_log_lines_of_proofserve_can_go_where_those_of_vllm_go() -> None:
    # plugin.logs.log_as
    assert logger.DEFAULT_LOGGING_CONFIG["loggers"]["vllm"]["handlers"] == ["vllm"]
    assert "pythonjsonlogger" in source(logger._configure_vllm_root_logger)
