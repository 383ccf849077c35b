"""Pins the private names of vLLM's two model runners that proof forwards rely on.

A failure here after an upgrade says which function of ``engines/vllm/compat_worker.py`` to revisit.
"""

import dataclasses

import pytest
from vllm.config import ModelConfig
from vllm.forward_context import set_forward_context
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu.model_runner import CPUModelRunner as SecondCPUModelRunner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import async_utils, model_states, pp_utils
from vllm.v1.worker.gpu import model_runner as second_model_runner
from vllm.v1.worker.gpu.mm import rope
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.utils import AttentionGroup

from support.contract import in_order, parameters, since, source

First = gpu_model_runner.GPUModelRunner
Second = second_model_runner.GPUModelRunner
BOTH = pytest.mark.parametrize("runner", [First, Second], ids=["first", "second"])
# What a runner keeps on itself, by the function of ours that reads it.
KEPT = {
    "worker.prove": ("model_config", "device"),
    "compat_worker.attention_metadata": ("attn_groups",),
    "compat_worker.group_layer_names": ("kv_cache_config",),
    "compat_worker.call_model": ("model", "model_config", "vllm_config"),
    "compat_worker.without_adapters": ("lora_config",),
}


@BOTH
@pytest.mark.parametrize("ours", KEPT)
def test_both_runners_keep_what_proofs_read(runner: type, ours: str) -> None:
    text = source(runner)
    for name in KEPT[ours]:
        assert any(f"self.{name}{sign}" in text for sign in (" = ", ": ", ",")), name
    assert parameters(runner.get_model) == ["self"]  # type: ignore[attr-defined]


def test_the_cpu_runners_are_those_runners() -> None:
    assert issubclass(CPUModelRunner, First)
    assert issubclass(SecondCPUModelRunner, Second)
    for own in (CPUModelRunner, SecondCPUModelRunner):
        assert not {"_model_forward", "execute_model"} & set(vars(own))
    assert issubclass(CPUWorker, Worker)
    assert "CPUModelRunner as CPUModelRunnerV2" in source(CPUWorker)


def test_call_model() -> None:
    assert {"num_tokens", "slot_mapping", "skip_compiled"} <= set(parameters(set_forward_context))
    assert "return self.model(" in source(First._model_forward)
    assert "model_output = self.model(**model_inputs)" in source(Second.execute_model)
    for inputs in ("input_ids", "positions", "inputs_embeds", "intermediate_tensors"):
        assert f"{inputs}={inputs}" in source(First._model_forward)
        assert f'"{inputs}": ' in source(Second.execute_model)
    assert isinstance(ModelConfig.uses_mrope, property)
    assert ("mrope_num_dims" in dir(ModelConfig)) == since(0, 30)
    assert "self.uses_mrope = model_config.uses_mrope" in source(First.__init__)
    if since(0, 30):
        assert "num_dims=model_config.mrope_num_dims" in source(rope.get_rope_state)
    else:
        assert "num_dims=3" in source(rope.get_rope_state)


def test_attention_metadata() -> None:
    # Until 0.31 our own code maps blocks of the pool to the kernel's, later the group does.
    assert hasattr(AttentionGroup, "build_metadata") == since(0, 32)
    if since(0, 32):
        build = AttentionGroup.build_metadata
        assert parameters(build)[:2] == ["self", "common_attn_metadata"]
        assert "self._with_kernel_block_table(common_attn_metadata" in source(build)
        of_all_groups = DefaultModelState.prepare_attn.__globals__["build_attn_metadata"]
        assert "attn_group.build_metadata(" in source(of_all_groups)
    assert {"layer_names", "kv_cache_group_id"} <= {
        field.name for field in dataclasses.fields(AttentionGroup)
    }
    assert "self.attn_groups" in source(First._build_attention_metadata)


def test_require_plain_inputs() -> None:
    assert "self.model_state = init_model_state(" in source(Second.load_model)
    # Models with inputs of their own bring a class of their own.
    assert in_order(
        source(model_states),
        'if hasattr(model, "get_model_state_cls"):',
        "return DefaultModelState",
    )
    assert "return {}  # Common case" in source(DefaultModelState.prepare_inputs)


def test_step_stream() -> None:
    assert "torch.cuda.current_stream(self.device)" in source(Second)
    assert "main_stream" in vars(Second)
    assert "main_stream" not in vars(First)
    # The tensors of which copies to the host are under way stay alive until those have ended.
    copy = source(async_utils.AsyncOutput.__init__)
    for kept in ("sampler_output", "num_sampled_tokens", "model_runner_output"):
        assert f"self.{kept} = {kept}" in copy
    assert "copy_stream.wait_stream(main_stream)" in copy
    assert "tensor.record_stream(self.broadcast_stream)" in source(pp_utils.PPHandler.broadcast)


def test_without_adapters() -> None:
    assert parameters(LoRAModelRunnerMixin._set_active_loras)[:4] == [
        "self", "prompt_lora_mapping", "token_lora_mapping", "lora_requests",
    ]  # fmt: skip
    assert issubclass(First, LoRAModelRunnerMixin)
    assert issubclass(Second, LoRAModelRunnerMixin)
    # Chat chooses its adapters again in each step.
    assert "self.set_active_loras(" in source(First._prepare_inputs)
    assert "self._set_active_loras(*lora_inputs)" in source(Second.execute_model)


def test_no_forward_comes_between_a_step_and_its_choice_of_tokens() -> None:
    """Both runners keep the states of a step in execute_model_state until the tokens are chosen."""
    assert in_order(
        source(EngineCore.step),
        "self.model_executor.execute_model(",
        "self.model_executor.sample_tokens(grammar_output)",
        "return engine_core_outputs",
    )
    # A step that has to wait for the tokens of the step before ends with the choice of its own.
    assert in_order(
        source(EngineCore.step_with_batch_queue),
        "self.model_executor.execute_model(",
        "deferred_scheduler_output = scheduler_output",
        "if not deferred_scheduler_output:",
        "if deferred_scheduler_output:",
        "future = self.model_executor.sample_tokens(grammar_output, non_block=True)\n",
        "return engine_core_outputs",
    )
