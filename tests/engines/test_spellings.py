"""Names of vLLM that moved: each spelling, on both sides of the move."""

import sys
from argparse import Namespace
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from proofserve.engines.vllm import compat_server
from proofserve.engines.vllm.compat_core import VllmCore, watchdog_feed
from proofserve.engines.vllm.compat_worker import attention_metadata
from proofserve.engines.vllm.core_messages import Forward

NEW = "vllm.entrypoints.common"
OLD = "vllm.entrypoints.launchers"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


def steps(*names: str) -> dict[str, str]:
    return {name: f"{name} of this module" for name in names}


@pytest.fixture
def old_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of 0.32, and no others."""
    for name in ("", ".cli_args", ".startup"):
        # Python raises ModuleNotFoundError for such an entry.
        monkeypatch.setitem(sys.modules, f"{NEW}{name}", None)  # type: ignore[arg-type]
    names = steps("make_arg_parser", "validate_parsed_serve_args")
    module(monkeypatch, f"{OLD}.cli_args", **names)
    module(monkeypatch, f"{OLD}.launcher", **steps("validate_api_server_args"))
    module(monkeypatch, "vllm.entrypoints.serve.utils.api_utils", **steps("cli_env_setup"))


@pytest.fixture
def new_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of 0.33, and no others."""
    for name in ("cli_args", "launcher"):
        monkeypatch.setitem(sys.modules, f"{OLD}.{name}", None)  # type: ignore[arg-type]
    names = steps("make_arg_parser", "validate_parsed_serve_args", "validate_api_server_args")
    module(monkeypatch, NEW)
    module(monkeypatch, f"{NEW}.cli_args", **names)
    module(monkeypatch, f"{NEW}.startup", **steps("cli_env_setup"))


@pytest.fixture
def oldest_places(monkeypatch: pytest.MonkeyPatch, old_places: None) -> None:
    """The modules of 0.26, and no others."""
    for name in ("cli_args", "launcher"):
        monkeypatch.setitem(sys.modules, f"{OLD}.{name}", None)  # type: ignore[arg-type]
    names = steps("make_arg_parser", "validate_parsed_serve_args")
    module(monkeypatch, "vllm.entrypoints.openai.cli_args", **names)
    module(monkeypatch, "vllm.entrypoints.openai.api_server", **steps("validate_api_server_args"))


@pytest.mark.parametrize("places", ["oldest_places", "old_places", "new_places"])
def test_the_steps_of_the_command_line(places: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(places)
    found = compat_server.argument_steps()
    for name in (
        "cli_env_setup",
        "make_arg_parser",
        "validate_parsed_serve_args",
        "validate_api_server_args",
    ):
        assert getattr(found, name) == f"{name} of this module"


def test_arguments_about_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Namespace] = []
    args = Namespace()
    name = "configure_logging_from_args"
    monkeypatch.setattr(compat_server.logger, name, applied.append, raising=False)
    compat_server.logging_step()(args)
    assert applied == [args]
    # Until 0.30 there are none.
    monkeypatch.delattr(compat_server.logger, name)
    compat_server.logging_step()(args)
    assert applied == [args]


@dataclass(frozen=True)
class Common:
    block_table_tensor: torch.Tensor


class OldGroup:
    """An attention group as until 0.31: its builder gets the blocks of the kernels."""

    layer_names = ("first", "second")
    kv_cache_spec = SimpleNamespace(block_size=32)

    def get_metadata_builder(self) -> "OldGroup":
        return self

    def build(self, common_prefix_len: int, common_attn_metadata: Common) -> list[list[int]]:
        assert common_prefix_len == 0
        return common_attn_metadata.block_table_tensor.tolist()


class NewGroup:
    """One as since 0.32, which maps the blocks itself."""

    layer_names = ("third",)

    def build_metadata(self, common_attn_metadata: Common) -> list[list[int]]:
        return common_attn_metadata.block_table_tensor.tolist()


@pytest.mark.parametrize(
    ("kernel", "blocks"), [(32, [[3, 0], [5, 7]]), (16, [[6, 7, 0, 1], [10, 11, 14, 15]])]
)
def test_attention_metadata_of_both_kinds_of_groups(kernel: int, blocks: list[list[int]]) -> None:
    table = torch.tensor([[3, 0], [5, 7]], dtype=torch.int32)
    groups = [[OldGroup()], [NewGroup()]]
    runner = SimpleNamespace(attn_groups=groups, _kernel_block_sizes=[kernel, kernel])
    assert attention_metadata(runner, [Common(table), Common(table)]) == {
        "first": blocks,
        "second": blocks,
        "third": [[3, 0], [5, 7]],
    }


class Engine:
    """An engine core that notes what happens, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def collective_rpc(self, *_call: Any) -> list[Any]:
        self.events.append("forward")
        return [None, {"kind": "proved"}]


def test_a_forward_is_fed_to_the_watchdog_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    noop = SimpleNamespace(feed=lambda: pytest.fail("this one was replaced"))
    dogs = [noop]
    module(monkeypatch, "vllm.utils.watch_dog", get_watch_dog=lambda: dogs[0])
    core = VllmCore(engine, "wakeup")
    # vLLM starts its watchdog after the engine.
    dogs[0] = SimpleNamespace(feed=lambda: engine.events.append("fed"))
    core.run_forward(Forward(call=None, blocks=(), block_sizes=()))  # type: ignore[arg-type]
    assert engine.events == ["fed", "forward", "fed"]


def test_before_0_33_there_is_no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.utils.watch_dog", None)  # type: ignore[arg-type]
    watchdog_feed()()
    engine = Engine()
    core = VllmCore(engine, "wakeup")
    core.run_forward(Forward(call=None, blocks=(), block_sizes=()))  # type: ignore[arg-type]
    assert engine.events == ["forward"]
