"""A proof forward on a rank: blocks, positions, adapters and streams, with stand-ins for a runner.

What a model runner of vLLM does with them, the tests with a real engine show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from proofserve.engines.vllm import compat_worker, worker
from proofserve.engines.vllm.core_messages import Forward, ProveCall
from proofserve.engines.vllm.support import UnsupportedEngine

SEQ_LEN = 80
POOL_BLOCK = 64
# Two sequences with two blocks of the pool each.
BLOCKS = ((7, 3), (12, 9))
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(max_model_len=1024, uses_mrope=False, mrope_num_dims=3),
    scheduler_config=SimpleNamespace(max_num_seqs=8),
    parallel_config=SimpleNamespace(
        decode_context_parallel_size=1, data_parallel_size=1, use_sequence_parallel_moe=False
    ),
    compilation_config=SimpleNamespace(fast_moe_cold_start=False, static_forward_context={}),
)


class Builder:
    """What a backend makes of the metadata: here the metadata itself."""

    requires_block_table_width = False

    def __init__(self, *_: Any) -> None:
        pass

    def build(self, _prefix: int, common: Any) -> Any:
        return common


def backend(kernel_block: int) -> Any:
    """An attention backend whose kernels know blocks of ``kernel_block`` tokens alone."""
    return SimpleNamespace(
        get_builder_cls=lambda: Builder,
        get_supported_kernel_block_sizes=lambda _spec=None: [kernel_block],
        get_name=lambda: "a backend",
    )


def runner_with(kernel_block: int, **changes: Any) -> Any:
    spec = FullAttentionSpec(
        block_size=POOL_BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    group = AttentionGroup(backend(kernel_block), ["layer"], spec, 0)
    group.create_metadata_builders(CONFIG, torch.device("cpu"), kernel_block)
    caches = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
    fields = {"attn_groups": [[group]], "kv_cache_config": caches, **changes}
    return SimpleNamespace(
        model_config=CONFIG.model_config, vllm_config=CONFIG, lora_config=None, **fields
    )


def forward() -> Forward:
    call = ProveCall("lease", {}, 1, None, (), "block", 7, "key", SEQ_LEN, [0, 1], 5.0)
    return Forward(call, (BLOCKS,), (POOL_BLOCK,))


def positions() -> torch.Tensor:
    return torch.arange(SEQ_LEN).repeat(len(BLOCKS))


@pytest.mark.parametrize("kernel_block", [16, 32, POOL_BLOCK])
def test_blocks_of_a_lease_become_the_blocks_of_the_kernel(kernel_block: int) -> None:
    runner = runner_with(kernel_block)
    metadata, slots = worker._attention(runner, forward(), positions())
    table = metadata["layer"].block_table_tensor
    parts = POOL_BLOCK // kernel_block
    assert table.tolist() == [
        [block * parts + part for block in blocks for part in range(parts)] for blocks in BLOCKS
    ]
    # The kernel reads each token where it was written.
    token = torch.arange(SEQ_LEN)
    read = table.long()[:, token // kernel_block] * kernel_block + token % kernel_block
    assert torch.equal(read.flatten(), slots["layer"])
    leased = {block * POOL_BLOCK + i for blocks in BLOCKS for block in blocks for i in range(64)}
    assert set(slots["layer"].tolist()) <= leased
    assert len(set(slots["layer"].tolist())) == len(BLOCKS) * SEQ_LEN


def test_a_group_without_attention_layers_has_no_metadata() -> None:
    runner = runner_with(POOL_BLOCK)
    runner.attn_groups = [[]]
    assert worker._attention(runner, forward(), positions())[0] == {}


@pytest.mark.parametrize("dimensions", [3, 4])
def test_positions_have_the_dimensions_that_the_model_reads(dimensions: int) -> None:
    seen: dict[str, Any] = {}
    config = SimpleNamespace(uses_mrope=True, mrope_num_dims=dimensions)
    runner = SimpleNamespace(
        model_config=config, vllm_config=CONFIG, model=lambda **given: seen.update(given)
    )
    inputs = {"positions": positions(), "input_ids": torch.zeros(160), "intermediate_tensors": None}
    compat_worker.call_model(runner, {}, {}, inputs)
    assert torch.equal(seen["positions"], positions().expand(dimensions, -1))
    assert sorted(seen) == ["input_ids", "inputs_embeds", "intermediate_tensors", "positions"]


def test_a_forward_uses_no_adapter() -> None:
    calls: list[Any] = []
    runner = SimpleNamespace(lora_config=object(), _set_active_loras=lambda *a: calls.append(a))
    compat_worker.without_adapters(runner, 2, 6)
    assert calls == [((0, 0), (0,) * 6, set())]
    compat_worker.without_adapters(SimpleNamespace(lora_config=None), 2, 6)


def test_a_model_with_inputs_of_its_own_is_refused() -> None:
    class DefaultModelState: ...

    class EncoderDecoderModelState: ...

    first = SimpleNamespace()
    plain = SimpleNamespace(model_state=DefaultModelState())
    other = SimpleNamespace(model_state=EncoderDecoderModelState(), get_model=dict)
    compat_worker.require_plain_inputs(first)
    compat_worker.require_plain_inputs(plain)
    with pytest.raises(UnsupportedEngine, match="dict needs the inputs of a EncoderDecoder"):
        compat_worker.require_plain_inputs(other)


def test_a_forward_runs_on_the_stream_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[object] = []

    @contextmanager
    def stream(chosen: object) -> Iterator[None]:
        entered.append(chosen)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    main = object()
    with compat_worker.step_stream(SimpleNamespace(main_stream=main)):
        assert entered == [main]
    with compat_worker.step_stream(SimpleNamespace()):
        assert entered == [main]
