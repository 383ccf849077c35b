"""The only reader of the environment. Everything below receives frozen values.

Variables are named ``POC_…`` as networks know them; ``proofserve serve`` turns its options into
them, so that vLLM's processes, which inherit the environment, all see the same deployment.
"""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

PLUGIN = "proofserve"
# The groups that vLLM loads whole while VLLM_PLUGINS is unset.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


class EngineSettings(BaseSettings):
    """What the engine core needs: the shape of a forward, the share of proofs, idle leases."""

    model_config = SettingsConfigDict(env_prefix="POC_", frozen=True)

    forward_batch: int = Field(32, ge=1, le=1024)
    share: float = Field(0.0, ge=0.0, le=0.9)
    lease_idle_sec: float = Field(30.0, gt=0.0)


class NodeSettings(BaseSettings):
    """What the API process needs. Durations in seconds unless the name says otherwise."""

    model_config = SettingsConfigDict(env_prefix="POC_", frozen=True)

    enabled: bool = False
    measure: bool = False
    scheme: Literal["artifact-v1", "artifact-v1-layers"] = "artifact-v1"
    seq_len: int | None = Field(None, ge=1)
    k_dim: int | None = Field(None, ge=1)
    batch_size_default: int = Field(32, ge=3, le=1024)
    outbox: Path = Path("proofserve-outbox.sqlite")
    defer_sec: float = Field(5.0, gt=0)
    rpc_timeout_ms: int = Field(60_000, ge=1)
    max_queued_nonces: int = Field(100_000, ge=1)
    generate_chunk_timeout_sec: float = Field(60.0, gt=0)
    generate_result_ttl_sec: float = Field(300.0, gt=0)
    callback_interval_sec: float = Field(5.0, gt=0)
    callback_max_artifacts: int = Field(1_000_000, ge=1)
    callback_max_retries: int = Field(10, ge=0)
    callback_max_concurrent: int = Field(10, ge=1)
    callback_queue_size: int = Field(10_000, ge=1)


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a child that we start."""
    return {**os.environ, **changes}


def has_variable(name: str) -> bool:
    """Whether the user set ``name``; defaults of ours step back for it."""
    return name in os.environ


def plugin_list() -> str:
    """The value of VLLM_PLUGINS that adds us without silencing anybody else.

    Setting the variable silences every plugin that it does not name, so all installed ones are
    listed when the user has not chosen.
    """
    chosen = os.environ.get("VLLM_PLUGINS")
    if chosen is not None:
        names = [name for name in chosen.split(",") if name]
    else:
        names = [p.name for group in PLUGIN_GROUPS for p in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, PLUGIN]))


def python() -> str:
    """The interpreter that runs us."""
    return sys.executable
