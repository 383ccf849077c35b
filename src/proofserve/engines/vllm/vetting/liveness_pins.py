"""Names of vLLM that a server relies on to see whether its engine cores make progress."""

from proofserve.engines.vllm.vetting.node_pins import CORE, CORE_CLIENT, SCHEDULER
from proofserve.engines.vllm.vetting.pins import Feature, Pin

LIVENESS = Feature(
    "noticing an engine that hangs",
    (
        Pin("liveness.compat_progress.report_steps", CORE, "EngineCore", ("step_fn",)),
        Pin("liveness.compat_progress.report_steps", CORE, "EngineCore.step"),
        Pin("liveness.compat_progress.report_steps", CORE, "EngineCore.step_with_batch_queue"),
        Pin("liveness.compat_progress.requests_in_core", SCHEDULER, "Scheduler", ("requests",)),
        Pin(
            "liveness.compat_progress.unfinished_by_core",
            "vllm.v1.engine.output_processor",
            "OutputProcessor",
            ("request_states",),
        ),
        Pin(
            "liveness.compat_progress.unfinished_by_core",
            "vllm.v1.engine.async_llm",
            "AsyncLLM",
            ("engine_core", "output_processor"),
        ),
        Pin(
            "liveness.compat_progress.unfinished_by_core",
            CORE_CLIENT,
            "DPLBAsyncMPClient",
            ("reqs_in_flight",),
        ),
    ),
)
