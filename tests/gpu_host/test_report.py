"""The report as a file and as a page."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpu.page import page
from gpu.report import (
    FAILED,
    PASSED,
    SKIPPED,
    RunReport,
    StepResult,
    aims_of,
    figures_of,
    headline,
    read,
)
from support.hosts import HOST

SPEEDS = {
    "nonces_per_second_64_32": 900.0,
    "nonces_per_second_64_512": 4100.0,
    "nonces_per_second_256_32": 250.0,
    "share_64_32": 0.1,
    "share_64_512": 0.4,
    "share_256_32": 0.2,
    "matmul_tflops": 700.0,
    "passed": True,
    "setup": {"model": "x"},
}
FORWARDS = [
    {"scheme": name, "seq_len": 64, "shares": {"inputs": 0.1, "model": 0.85, "finish": 0.05}}
    for name in ("artifact-v1", "sketch-v1")
]
CHAT = {"latency_s_plain": 0.2, "latency_s_round": 0.25, "throughput_ratio": 0.99}
NOISE = {
    "populations": [{"facts": {"name": "TF32"}, "figures": {"lengths": [0.01, 0.02]}}],
    "left_out": {"room": 1.25, "convicted": {"TF32": 12}},
    "dist_threshold": 0.03,
    "seq_len": 256,
}
COSTS = {
    "chat_tokens_lost_per_proof_token_dedicated": 0.03,
    "chat_tokens_lost_per_proof_token_same_batch": 0.01,
    "same_batch_over_dedicated": 0.33,
}


def step(name: str, record: dict[str, Any] | None = None, outcome: str = PASSED) -> StepResult:
    return StepResult(name, f"what {name} shows", outcome, record=record, command=["python", "-x"])


def full_report() -> RunReport:
    report = RunReport("2026-11-23T00:00:00+00:00", {"short": False, "device": "cuda"})
    report.host = asdict(HOST)
    report.steps = [
        step("reference", SPEEDS),
        step("profile", {"overhead_artifact-v1_64": 0.15, "windows": {"forwards": FORWARDS}}),
        step("noise-emulated", NOISE),
        step("audit", {"populations": ["as deployed"]}),
        step("chat-priority", CHAT),
        step("chat-graphs", CHAT),
        step("same-batch", COSTS),
        replace(step("golden", None, FAILED), reason="<script>alert(1)</script>", log="<b>log</b>"),
        replace(step("noise-vllm-tp2", None, SKIPPED), reason="needs 2 cards, and this host has 1"),
    ]
    report.aims = aims_of(report)
    report.finished = True
    return report


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    report = full_report()
    file = report.write(tmp_path)
    assert read(file).json() == json.loads(json.dumps(report.json()))
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-report.json"]


def test_the_home_of_the_user_is_not_in_the_file(tmp_path: Path) -> None:
    report = RunReport("now", {"model": str(Path.home() / "weights")})
    report.steps = [replace(step("golden"), log=f"read {Path.home()}/x")]
    assert str(Path.home()) not in report.write(tmp_path).read_text()
    assert read(tmp_path / "gpu-report.json").options == {"model": "~/weights"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other", "version": 1, "steps": []}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no report of make gpu"):
        read(file)


def test_figures_are_the_named_numbers() -> None:
    assert figures_of({"a": 1, "b": None, "c": "text", "passed": True, "setup": {"d": 2}}) == {
        "a": 1,
        "b": None,
    }
    covered = {"dist_threshold": 0.03, "left_out_convicted": 12, "room": 1.25}
    assert figures_of(NOISE) == covered


def test_the_best_figure_is_the_headline() -> None:
    assert headline(step("reference", SPEEDS)) == (
        "nonces_per_second_64 4,100, nonces_per_second_256 250, matmul_tflops 700"
    )
    assert headline(step("models", {"seconds": 3})) == ""


def test_aims_are_those_of_the_card() -> None:
    found = {aim["aim"]: aim["reached"] for aim in aims_of(full_report())}
    assert found == {
        "nonces_per_second_64: 0.6B, 64 tokens, nonces a second, at least 4,000": True,
        "overhead_artifact-v1: inputs and finish, of a forward, at most 0.05": False,
    }
    report = full_report()
    report.options = {"short": True}
    assert aims_of(report) == []
    report.options, report.host = {}, None
    assert aims_of(report) == []


def test_the_page_needs_no_network_and_shows_every_step() -> None:
    text = page(full_report())
    assert text.startswith("<!DOCTYPE html>")
    assert text.count("<svg") == 5
    assert "6 passed" not in text
    assert "7 passed, 1 failed, 1 skipped" in text
    assert "needs 2 cards, and this host has 1" in text
    assert "NVIDIA H200, 140 GiB" in text
    for each in full_report().steps:
        assert each.title in text
    assert "<script" not in text
    assert "<b>log" not in text
    for loading in ("src=", 'href="http', "@import", "url(http"):
        assert loading not in text


def test_the_page_of_an_empty_run_says_so() -> None:
    text = page(RunReport("now", {}))
    assert "0 passed, 0 failed, 0 skipped" in text
    assert "stopped before its end" in text
    assert "could not be looked at" in text
    assert "<svg" not in text
