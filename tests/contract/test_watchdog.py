"""The watchdog that vLLM has since 0.33: how it is fed, and that a proof counts as progress."""

import importlib.util
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCoreProc

from proofserve.engines.vllm.compat_core import VllmCore
from proofserve.engines.vllm.core_messages import Forward

NAME = "vllm.utils.watch_dog"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(NAME) is None, reason="this version of vLLM has no watchdog"
)


def test_vllm_feeds_it_before_a_step_of_chat_alone() -> None:
    core = inspect.getsource(EngineCoreProc)
    assert core.count("get_watch_dog().feed()") == 1
    assert "get_watch_dog().feed()" in inspect.getsource(EngineCoreProc._process_engine_step)


def test_a_proof_forward_feeds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watch_dog = importlib.import_module(NAME)
    config = SimpleNamespace(timeout=300, check_interval=10, dump_dir=str(tmp_path))
    real = watch_dog.ThreadedWatchDog("engine_0", config, logging.getLogger())
    monkeypatch.setattr(watch_dog, "_watch_dog", real)
    seen: list[float] = []

    def forward(*_args: Any) -> list[dict[str, Any]]:
        seen.append(real.last_feed_time)
        real.last_feed_time = 0.0
        return [{}]

    real.last_feed_time = 0.0
    core = VllmCore(SimpleNamespace(collective_rpc=forward), "wakeup")
    core.run_forward(Forward(call=None, blocks=(), block_sizes=()))  # type: ignore[arg-type]
    assert seen[0] > 0
    assert real.last_feed_time > 0
