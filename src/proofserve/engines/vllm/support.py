"""Which versions and options of vLLM support proofs. It imports no private name of vLLM."""

from typing import Any

import vllm

TESTED = ((0, 32),)


class UnsupportedEngine(RuntimeError):
    """Proofs cannot run on this vLLM or with its options. The text says what to change."""


def require_tested_version() -> str:
    """Return vLLM's version. Raises UnsupportedEngine for one that was not tested."""
    version = str(vllm.__version__)
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if major_minor not in TESTED:
        tested = ", ".join(".".join(map(str, pair)) + ".x" for pair in TESTED)
        raise UnsupportedEngine(
            f"vLLM {version} was not tested with this release of proofserve (tested: {tested}). "
            "Install a tested version, or start without --enable-poc."
        )
    return version


def require_supported_options(vllm_config: Any) -> None:
    """Raise UnsupportedEngine for vLLM's second model runner and for a split deployment.

    A round has one owner and one engine. Proof forwards work on the first model runner.

    Relies on: ParallelConfig._api_process_count, set by ``vllm serve --api-server-count``.
    """
    if vllm_config.use_v2_model_runner:
        raise UnsupportedEngine(
            "vLLM's second model runner was not tested. Set VLLM_USE_V2_MODEL_RUNNER=0 "
            "(proofserve serve does)."
        )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        raise UnsupportedEngine(
            f"data parallel size {parallel.data_parallel_size}: every replica would need a round "
            "of its own. Start one server per replica and give each its group_id of n_groups."
        )
    if parallel._api_process_count > 1:
        raise UnsupportedEngine(
            f"{parallel._api_process_count} API server processes: a round has one owner. "
            "Start vLLM with --api-server-count 1."
        )
