"""This process: its environment, and the plugins that vLLM loads."""

import os
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points

PLUGIN = "proofserve"
# Groups of plugins; vLLM loads all plugins of these while VLLM_PLUGINS is unset.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


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
