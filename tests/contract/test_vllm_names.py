"""How vLLM's private names behave, on which the adapter relies; ``test_pins`` says where they are.

A failure here after an upgrade says which function of ``engines/vllm/compat_*.py`` to revisit.
"""

import dataclasses
import importlib
import inspect
import json
import queue
import time
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm import _custom_ops as ops
from vllm import logger
from vllm.config import (
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.serve.instrumentator import metrics
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import InprocClient, MPClient
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from proofserve.engines.vetting.features import PROOFS
from proofserve.engines.vllm import support
from proofserve.engines.vllm.compat_core import VllmCore
from proofserve.host import multiplies_bytes
from support.contract import in_order, parameters, since, source


def entrypoint(name: str, old: str) -> Any:
    """A module of ``vllm.entrypoints``; ``old`` is its name before 0.29."""
    return importlib.import_module(f"vllm.entrypoints.{name if since(0, 29) else old}")


entry = entrypoint("launchers.api_server.entry", "openai.api_server")
app_state = entrypoint("launchers.api_server.app_state", "openai.api_server")
app = entrypoint("launchers.app", "openai.api_server")
launcher = entrypoint("launchers.launcher", "launcher")
server_utils = entrypoint("launchers.utils.server_utils", "serve.utils.server_utils")
errors = entrypoint("serve.exception_handling.handlers.vllm_error", "serve.utils.server_utils")


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_sequences_divided_over_ranks_are_refused(kind: str) -> None:
    sizes = dict.fromkeys(["decode_context_parallel_size", "prefill_context_parallel_size"], 1)
    divided = SimpleNamespace(**{**sizes, f"{kind}_context_parallel_size": 2})
    with pytest.raises(support.UnsupportedEngine, match=rf"--{kind}-context-parallel-size"):
        support.require_supported_options(SimpleNamespace(parallel_config=divided))
    fields = {field.name for field in dataclasses.fields(ParallelConfig)}
    assert f"{kind}_context_parallel_size" in fields


def test_latent_attention_on_a_processor_needs_positions_by_torch() -> None:
    """Mended in vLLM, the refusal goes: then its kernel rotates each head of a query alike."""
    with set_current_vllm_config(VllmConfig()):
        kind = {"rope_type": "default"}
        rotary = get_rope(64, 32, is_neox_style=False, rope_parameters=kind, dtype=torch.float32)
    query, key = torch.randn(8, 4, 64), torch.randn(8, 1, 64)
    positions = torch.arange(8)
    right, _ = rotary.forward_native(positions, query.clone(), key.clone())
    flat, _ = rotary.forward_cpu(positions, query.flatten(1), key.flatten(1))
    heads, _ = rotary.forward_cpu(positions, query.clone(), key.clone())
    torch.testing.assert_close(flat.view_as(right), right)
    assert (heads - right).abs().max() > 1

    latent = SimpleNamespace(kv_lora_rank=512)
    with pytest.raises(support.UnsupportedEngine, match=r"-rotary_embedding") as refused:
        support.require_supported_options(options(latent, CompilationConfig(custom_ops=["all"])))
    option = str(refused.value).partition("--compilation-config '")[2].partition("'")[0]
    offered = CompilationConfig(**json.loads(option))
    offered.custom_ops.append("all")
    support.require_supported_options(options(latent, offered))
    support.require_supported_options(
        options(SimpleNamespace(), CompilationConfig(custom_ops=["all"]))
    )


@pytest.mark.skipif(not current_platform.is_cpu(), reason="cards add up bytes in 32 bits")
def test_activations_in_int8_are_refused_where_their_sums_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do where there is no VNNI; mended in oneDNN, the refusal goes."""
    bytes_, scale = torch.full((8, 64), 127, dtype=torch.int8), torch.ones(8, 1)
    handler = ops.create_onednn_scaled_mm(
        bytes_.T, scale, torch.float32, dynamic_quant=True, use_azp=False, primitive_cache_size=8
    )
    found = torch.empty(8, 8)
    ops.onednn_scaled_mm(handler, bytes_, found, scale, None, None, None)
    assert bool((found == 64 * 127 * 127).all()) is multiplies_bytes()

    int8 = {"config_groups": {"all": {"input_activations": {"type": "int", "num_bits": 8}}}}
    served = options(SimpleNamespace(quantization_config=int8), CompilationConfig())
    monkeypatch.setattr(support, "multiplies_bytes", lambda: True)
    support.require_supported_options(served)
    monkeypatch.setattr(support, "multiplies_bytes", lambda: False)
    with pytest.raises(support.UnsupportedEngine, match="activations in int8"):
        support.require_supported_options(served)
    assert "self.hf_config = hf_config" in source(ModelConfig.__post_init__)
    # Of weights alone the products are not of bytes.
    int8["config_groups"]["all"] = {"input_activations": None}
    support.require_supported_options(served)


def test_a_model_of_a_class_that_was_never_tried_is_named() -> None:
    def told(name: str) -> str | None:
        config = SimpleNamespace(model_config=SimpleNamespace(architecture=name))
        return support.untried_model(config)

    assert told("Qwen3ForCausalLM") is None
    assert "never tried with FalconForCausalLM" in str(told("FalconForCausalLM"))
    assert isinstance(inspect.getattr_static(ModelConfig, "architecture"), property)


def options(text_config: SimpleNamespace, compilation: CompilationConfig) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(
            hf_text_config=text_config, hf_config=text_config, is_moe=True
        ),
        compilation_config=compilation,
    )


def test_call_engine_sync() -> None:
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


def test_a_second_wakeup_does_not_wait_in_the_queue() -> None:
    messages: queue.Queue[Any] = queue.Queue()
    core = VllmCore(SimpleNamespace(input_queue=messages), "wakeup")
    core.post_wakeup()
    messages.put_nowait((EngineCoreRequestType.ADD, (SimpleNamespace(request_id="a"), 0)))
    core.post_wakeup()
    assert messages.qsize() == 2
    messages.get_nowait()
    core.post_wakeup()
    assert core.waiting_requests() == ["a"]
    assert messages.qsize() == 2


def test_a_forward_between_two_steps_is_a_span_in_the_trace_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr("opentelemetry.trace.get_tracer", provider.get_tracer)
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    known = {"a": SimpleNamespace(trace_headers=headers), "b": SimpleNamespace(trace_headers=None)}
    core = VllmCore(SimpleNamespace(scheduler=SimpleNamespace(requests=known)), "")
    now = time.monotonic()
    core.delayed(now - 2.0, now - 1.5)
    (span,) = memory.get_finished_spans()
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time == pytest.approx(0.5e9, rel=1e-3)
    assert time.time_ns() - span.end_time == pytest.approx(1.5e9, abs=0.5e9)
    assert "self.requests[" in source(Scheduler.add_request)


def test_await_message() -> None:
    assert "self.input_queue = queue.Queue[" in source(EngineCoreProc.__init__)
    assert {"not_empty", "queue"} <= set(vars(queue.Queue()))


def test_waiting_requests_and_is_busy() -> None:
    assert "req, request_wave = request" in source(EngineCoreProc._handle_client_request)
    assert "scheduler.has_requests()" in source(EngineCoreProc.has_work)


def test_watch() -> None:
    assert "self.preprocess_add_request(req)" in source(EngineCoreProc.process_input_sockets)
    step = source(EngineCoreProc._process_engine_step)
    # A forward before the step function delays no tokens of the step before it.
    assert 0 < step.index("self.step_fn()") < step.index("self.output_queue.put_nowait(")
    assert "self.step_fn = (" in source(EngineCore.__init__)


def test_take_blocks() -> None:
    assert "raise ValueError" in source(BlockPool.get_new_blocks)


def test_common_metadata() -> None:
    names = [pin.newest for pin in PROOFS]
    (given,) = [each.has for each in names if each.name == "CommonAttentionMetadata"]
    fields = dataclasses.fields(CommonAttentionMetadata)
    assert {f.name for f in fields if f.default is dataclasses.MISSING} <= set(given)


def test_server_arguments() -> None:
    logging = ["configure_logging_from_args(args)"] if since(0, 31) else []
    assert in_order(
        source(entry.main if since(0, 29) else entry),
        "cli_env_setup()\n",
        "make_arg_parser(parser)",
        *logging,
        "validate_parsed_serve_args(args)",
    )
    plugins = (
        "ToolParserManager.import_tool_parser(args.tool_parser_plugin)",
        "ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)",
    )
    setup = source((launcher if since(0, 29) else entry).setup_server)
    if since(0, 33):
        cli_args = importlib.import_module("vllm.entrypoints.common.cli_args")
        assert in_order(source(cli_args.init_parser_plugin), *plugins)
        plugins = ("init_parser_plugin(args)",)
    assert in_order(setup, *plugins, "validate_api_server_args(args)")


def test_running_app() -> None:
    assert in_order(source(server_utils.lifespan), "freeze_gc_heap()", "yield", "del app.state")


def test_running_engine() -> None:
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
    assert "state.queue.put(e)" in source(OutputProcessor.propagate_error)
    collector = RequestOutputCollector(RequestOutputKind.DELTA, "a request")
    stopping = ValueError("the server stops")
    collector.put(stopping)
    collector.put(RequestOutput("a request", None, None, None, [], finished=True))
    assert collector.output is stopping
    assert "self.output_processor = OutputProcessor(" in source(AsyncLLM.__init__)
    raised = "except (VLLMClientError, GracefulHTTPError, GenerationError) as e:"
    if not since(0, 33):
        raised = raised.replace(", GenerationError", "")
    if not since(0, 29):
        raised = "except EngineDeadError:"
    assert raised in source(AsyncLLM.generate)
    stream = f"chat_completion_stream_generator{'_raw' if since(0, 33) else ''}"
    assert "except GenerationError as e:" in source(getattr(OpenAIServingChat, stream))
    # Without propagate_error nothing wakes them where the task that would is cancelled first.
    assert in_order(source(AsyncLLM.shutdown), "output_handler", "cancel_task_threadsafe(handler)")


def test_the_wait_for_clients_can_be_limited() -> None:
    # plugin.endpoint sets timeout_graceful_shutdown of app.state.server in the lifespan.
    kind = "NoSignalServer" if since(0, 29) else "uvicorn.Server"
    assert kind == "uvicorn.Server" or issubclass(launcher.NoSignalServer, uvicorn.Server)
    assert in_order(
        source(launcher.serve_http),
        f"server = {kind}(config",
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
    assert parameters(app.build_app) == ["args", "supported_tasks", "model_config"]
    assert parameters(app_state.init_app_state) == [
        "engine_client",
        "state",
        "args",
        "supported_tasks",
    ]
    assert "server=req.app.state.server" in source(errors.engine_error_handler)
    assert "server.should_exit = True" in source(launcher.terminate_if_errored)


def test_the_page_of_metrics_is_made_in_another_thread_from_the_default_registry() -> None:
    # api.metrics.read_from_thread waits for the loop, and plugin.endpoint registers it there.
    app = FastAPI()
    metrics.attach_router(app)
    (route,) = [each for each in app.routes if isinstance(each, APIRoute)]
    assert route.path == "/metrics"
    assert not inspect.iscoroutinefunction(route.endpoint)
    assert metrics.get_prometheus_registry() is prometheus_client.REGISTRY


def test_log_lines_of_proofserve_can_go_where_those_of_vllm_go() -> None:
    # plugin.logs.log_as
    assert logger.DEFAULT_LOGGING_CONFIG["loggers"]["vllm"]["handlers"] == ["vllm"]
    assert ("pythonjsonlogger" in source(logger._configure_vllm_root_logger)) == since(0, 32)
