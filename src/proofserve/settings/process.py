"""This process: its environment, and the plugins that vLLM loads."""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from proofserve.host import PLUGIN, PLUGIN_GROUP

# Groups of plugins; vLLM loads all plugins of these while VLLM_PLUGINS is unset.
PLUGIN_GROUPS = (
    PLUGIN_GROUP,
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)

OTLP = "OTEL_EXPORTER_OTLP_"


def export(changes: Mapping[str, str], drop: Iterable[str] = ()) -> None:
    """Set ``changes`` and remove ``drop`` in the environment that child processes inherit."""
    os.environ.update(changes)
    for name in drop:
        os.environ.pop(name, None)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **changes}


def has_variable(name: str) -> bool:
    """Whether the operator set ``name``; it then takes precedence over our default."""
    return name in os.environ


class TraceExport(NamedTuple):
    """Where traces go, as OpenTelemetry's own variables say."""

    endpoint: str
    protocol: str


def trace_export() -> TraceExport | None:
    """None if those variables name no endpoint, or switch traces off."""
    read = os.environ.get
    off = read("OTEL_SDK_DISABLED", "").lower() == "true"
    if off or read("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    own, shared = read(f"{OTLP}TRACES_ENDPOINT"), read(f"{OTLP}ENDPOINT")
    usual = read(f"{OTLP}PROTOCOL") or "http/protobuf"
    protocol = read(f"{OTLP}TRACES_PROTOCOL") or usual
    if not own and shared:
        own = shared if protocol == "grpc" else f"{shared.rstrip('/')}/v1/traces"
    return TraceExport(own, protocol) if own else None


def variable(name: str) -> str | None:
    """The value of a variable that the operator names."""
    return os.environ.get(name)


def plugin_list() -> str:
    """The value of VLLM_PLUGINS that adds proofserve, and keeps every plugin.

    vLLM loads none that a set variable does not name: without the operator's list this names all.
    """
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
    else:
        names = [p.name for group in PLUGIN_GROUPS for p in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, PLUGIN]))
