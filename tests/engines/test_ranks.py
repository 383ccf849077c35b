"""Which proofserve each rank has, and what the engine core says of ranks that have another."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

import proofserve
from proofserve.engines.vetting.start import reporter, require_equal
from proofserve.engines.vllm.support import UnsupportedEngine
from support.ranks import ONE_MORE_LINE, changed_copy

OWN = {"rank": None, "host": "head", "version": "1.0", "digest": "a" * 64, "obstacle": None}
RUN = "import sys, json, cloudpickle; report = cloudpickle.loads(sys.stdin.buffer.read())"


def core(*reports: dict[str, Any], ranks: int | None = None) -> SimpleNamespace:
    """An engine core whose workers give ``reports``."""
    parallel = SimpleNamespace(world_size=len(reports) if ranks is None else ranks)

    def collective_rpc(report: Callable[[Any], dict[str, Any]], timeout: float) -> list[Any]:
        assert timeout > 0
        return list(reports)

    config = SimpleNamespace(parallel_config=parallel)
    return SimpleNamespace(collective_rpc=collective_rpc, vllm_config=config)


def rank(number: int, host: str = "head", **changes: object) -> dict[str, Any]:
    return {**OWN, "rank": number, "host": host, **changes}


def test_a_report_has_version_and_digest_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = reporter()(SimpleNamespace(rank=3))
    assert before == reporter()(SimpleNamespace(rank=3))
    assert (before["rank"], before["version"]) == (3, proofserve.__version__)
    copy = changed_copy(tmp_path)
    monkeypatch.setattr(proofserve, "__path__", [str(copy)])
    changed = reporter()(None)
    assert changed["rank"] is None
    assert changed["digest"] != before["digest"]
    draws = copy / "protocol" / "draws.py"
    draws.write_text(draws.read_text().removesuffix(ONE_MORE_LINE))
    assert reporter()(None)["digest"] == before["digest"]
    draws.rename(copy / "protocol" / "drawn.py")
    assert reporter()(None)["digest"] != before["digest"]


@pytest.mark.parametrize("installed", [True, False])
def test_the_report_travels_as_code_to_a_worker_with_and_without_proofserve(
    installed: bool,
) -> None:
    forget = "" if installed else "sys.modules['proofserve'] = None; "
    lines = f"{RUN}; {forget}print(json.dumps(report(None)))"
    ran = subprocess.run(
        [sys.executable, "-c", lines], input=cloudpickle.dumps(reporter()),
        capture_output=True, check=True, timeout=60,
        env={"PYTHONPATH": str(Path(proofserve.__path__[0]).parent)},
    )  # fmt: skip
    found = json.loads(ran.stdout)
    expected = reporter()(None)
    assert found == (expected if installed else {**expected, "version": None, "digest": None})


def test_equal_ranks_pass_with_the_names_of_their_hosts() -> None:
    assert require_equal(core(rank(0), rank(1, "other"), rank(2)), OWN) == {
        "hosts": ["head", "other"],
        "obstacle": None,
    }


def test_a_model_whose_experts_no_block_can_choose_is_told_and_not_refused() -> None:
    ranks = core(rank(0), rank(1, obstacle="a kernel chooses"))
    assert require_equal(ranks, OWN)["obstacle"] == "a kernel chooses"


def test_another_digest_or_version_is_refused_with_rank_host_and_both() -> None:
    ranks = rank(0), rank(1, "b", digest="b" * 64), rank(2, "c", version="0.9")
    with pytest.raises(UnsupportedEngine) as refused:
        require_equal(core(*ranks), OWN)
    text = str(refused.value)
    own = f"and this server on host head has proofserve 1.0 (sources {'a' * 12})."
    assert f"rank 1 on host b has proofserve 1.0 (sources {'b' * 12}), {own}" in text
    assert f"rank 2 on host c has proofserve 0.9 (sources {'a' * 12}), {own}" in text
    assert "rank 0" not in text
    assert "Install the same release" in text


def test_a_rank_without_proofserve_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="rank 1 on host b has no proofserve, and this"):
        require_equal(core(rank(0), rank(1, "b", version=None, digest=None)), OWN)


def test_a_rank_that_does_not_answer_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="1 of 2 ranks answered"):
        require_equal(core(rank(0), ranks=2), OWN)
