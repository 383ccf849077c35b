"""Which options of vLLM support proofs; ``vetting`` says which versions."""

import shlex
from typing import Any, Final

from proofserve.host import multiplies_bytes

_ROTARY: Final = "rotary_embedding"
ROTATED_BY_PYTORCH: Final = ("--compilation-config", f'{{"custom_ops": ["-{_ROTARY}"]}}')
"""Runs vLLM's rotary embedding in PyTorch instead of in its own kernel."""

TRIED_MODELS: Final = frozenset(
    {
        *("Qwen3ForCausalLM", "LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3MoeForCausalLM"),
        *("MixtralForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
        "MiniMaxM2ForCausalLM",
    }
)
"""vLLM's classes of the models that have a row in docs/models.md."""


class UnsupportedEngine(RuntimeError):
    """Proofs cannot run on this vLLM or with its options. The text says what to change."""


def require_supported_options(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for sequences split over ranks and for cores that step together.

    A sequence of a proof has all its keys and values on each rank of a pipeline stage.

    Relies on: ParallelConfig.data_parallel_size, ModelConfig.is_moe; data parallel cores of other
    models being independent of each other.
    """
    parallel = vllm_config.parallel_config
    for kind in ("decode", "prefill"):
        ranks = getattr(parallel, f"{kind}_context_parallel_size")
        if ranks > 1:
            raise UnsupportedEngine(
                f"{kind} context parallel size {ranks}: keys and values of a sequence lie on "
                "several ranks, and proofs need them whole. Start without "
                f"--{kind}-context-parallel-size."
            )
    if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:
        raise UnsupportedEngine(
            f"--data-parallel-size {parallel.data_parallel_size} of a model with experts: its "
            "engine cores step together, and a proof on one of them would stop the others. Start "
            "with --data-parallel-size 1 and --tensor-parallel-size, or one server for each "
            "replica with its own POC_OUTBOX, and give each its group_id of n_groups."
        )
    _require_right_positions(vllm_config)
    _require_exact_integers(vllm_config)


def _require_right_positions(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for latent attention whose queries would get wrong positions.

    In vLLM 0.32 the kernel of the CPU build mixes up the heads of queries that come as [tokens,
    heads, dims], as latent attention has them: chat is wrong too, from its second token on.

    Relies on: CompilationConfig.is_custom_op_enabled, ModelConfig.hf_text_config.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - asks the drivers

    latent = getattr(vllm_config.model_config.hf_text_config, "kv_lora_rank", None)
    if not (latent and current_platform.is_cpu()):
        return
    if vllm_config.compilation_config.is_custom_op_enabled(_ROTARY):
        raise UnsupportedEngine(
            "latent attention (kv_lora_rank) on a processor: vLLM's kernel there gives queries "
            "wrong positions, so chat and proofs would be those of another model. Start with "
            f"{shlex.join(ROTATED_BY_PYTORCH)}."
        )


def _require_exact_integers(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for activations in int8 where their sums overflow.

    Without VNNI a processor adds up two products of bytes in 16 bits, and keeps the largest number
    if the sum is larger: chat, too, is that of another model (Zen 3: each matrix of 256 inputs errs
    by 3 %, three times as much as the rounding to int8).

    Relies on: ModelConfig.hf_config with the checkpoint's own quantization_config.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - asks the drivers

    declared = getattr(vllm_config.model_config.hf_config, "quantization_config", None) or {}
    groups = dict(declared).get("config_groups") or {}
    inputs = [each.get("input_activations") or {} for each in groups.values()]
    has_int8 = any((each.get("type"), each.get("num_bits")) == ("int", 8) for each in inputs)
    if has_int8 and current_platform.is_cpu() and not multiplies_bytes():
        raise UnsupportedEngine(
            "activations in int8 on a processor without VNNI: there sums of products overflow, so "
            "chat and proofs would be those of another model. Serve this checkpoint on a processor "
            "with VNNI, or another checkpoint here."
        )


def untried_model(vllm_config: Any) -> str | None:
    """What to tell an operator whose model is of a class that was never tried; None if it was.

    Relies on: ModelConfig.architecture.
    """
    name = str(vllm_config.model_config.architecture)
    if name in TRIED_MODELS:
        return None
    return (
        f"proofs were never tried with {name} (docs/models.md): verify a round of this server"
        " before it earns anything"
    )


def api_processes(vllm_config: Any) -> int:
    """How many API server processes the server has.

    Relies on: ParallelConfig._api_process_count, set by ``vllm serve --api-server-count``.
    """
    return int(vllm_config.parallel_config._api_process_count)


def require_receipts(vllm_config: Any) -> None:
    """Raise ValueError, naming the option, for one with which receipts would be wrong."""
    if vllm_config.speculative_config is not None:
        raise ValueError(
            "POC_RECEIPTS: with speculative decoding a step has several rows for a request, of "
            "which the engine discards some. Start without --speculative-config or without "
            "--receipts."
        )
    if (count := api_processes(vllm_config)) > 1:
        raise ValueError(
            f"POC_RECEIPTS: with {count} API server processes no process knows all answers. Start "
            "with --api-server-count 1 or without --receipts."
        )
    if vllm_config.parallel_config.distributed_executor_backend == "ray":
        raise ValueError(
            "POC_RECEIPTS: Ray's workers choose tokens without vLLM's worker, so no row could be "
            "kept. Start with --distributed-executor-backend mp or without --receipts."
        )
