"""``proofserve doctor`` on this machine, and its lines for hosts that lack something."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from proofserve.cli.main import app
from proofserve.outbox.database import hold_lock
from proofserve.settings.node import NodeSettings
from proofserve_lab import doctor
from proofserve_lab.doctor import HostLine, host_lines, verdict
from proofserve_lab.facts import TorchFacts
from support.hosts import HOST

NAMES = "proofserve packages torch cards memory vLLM plugin outbox keys".split()  # noqa: SIM905


@pytest.fixture
def chosen(tmp_path: Path) -> NodeSettings:
    return NodeSettings(outbox=tmp_path / "outbox.sqlite")


@pytest.fixture(autouse=True)
def tested_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "slow_checks", lambda *_: {"vLLM": lambda: "tested"})


def by_name(found: list[HostLine]) -> dict[str, HostLine]:
    return {each.name: each for each in found}


def test_a_host_with_everything(chosen: NodeSettings) -> None:
    found = host_lines(chosen, HOST)
    assert [each.name for each in found] == NAMES
    assert verdict(found) == {"serve": True, "prove": True, "verify": True}
    assert by_name(found)["cards"].text == "NVIDIA H200 (138 of 140 GiB free)"
    assert by_name(found)["keys"].remedy == "set POC_API_KEY for calls of other machines"
    assert [each.name for each in found if each.lacking] == []
    # Nothing was made.
    assert list(chosen.outbox.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "name", "text", "lacking"),
    [
        ({"missing": ("scipy",)}, "packages", "scipy", {"serve", "prove", "verify"}),
        ({"torch": TorchFacts(None)}, "torch", "none", {"serve", "prove", "verify"}),
        (
            {"torch": TorchFacts("2.11.0", problem="torch cannot be imported: libc")},
            "torch",
            "libc",
            {"serve", "prove", "verify"},
        ),
        ({"available_gib": 0.5}, "memory", "0.5 of 128.0 GiB", {"serve", "prove", "verify"}),
        ({"vllm": None}, "vLLM", "none", {"serve", "prove"}),
        ({"vllm": "0.32.0+cpu"}, "vLLM", "the build for CPUs", set()),
        ({"plugin": False}, "plugin", "not installed as a package", {"prove"}),
    ],
)
def test_what_a_host_lacks(
    chosen: NodeSettings, changes: dict[str, object], name: str, text: str, lacking: set[str]
) -> None:
    found = host_lines(chosen, replace(HOST, **changes))  # type: ignore[arg-type]
    line = by_name(found)[name]
    assert text in line.text
    assert line.lacking == lacking
    assert line.remedy
    assert {task for task, can in verdict(found).items() if not can} == lacking


def test_the_memory_says_how_large_a_model_can_be_verified(chosen: NodeSettings) -> None:
    found = by_name(host_lines(chosen, replace(HOST, available_gib=18.0)))["memory"]
    assert found.text.endswith("verifies models whose layers have up to 1.4B parameters each")
    assert not found.lacking


def test_a_card_that_torch_cannot_use_is_named(chosen: NodeSettings) -> None:
    cpu = TorchFacts("2.13.0", problem="torch 2.13.0 was built without CUDA")
    found = by_name(host_lines(chosen, replace(HOST, torch=cpu)))
    assert found["torch"].remedy == "install torch's CUDA build: this host has a card"
    assert "the driver shows NVIDIA H200, 580.1" in found["cards"].text
    without = by_name(host_lines(chosen, replace(HOST, torch=cpu, driver_cards=())))
    assert without["torch"].remedy is None
    assert "none" in without["cards"].text


@pytest.mark.parametrize(
    ("error", "lacking"),
    [
        ("vLLM 0.40.0 was not tested with this release", {"prove"}),
        ("vLLM cannot be imported: no libcuda", {"serve", "prove"}),
    ],
)
def test_a_vllm_that_cannot_prove(
    chosen: NodeSettings, monkeypatch: pytest.MonkeyPatch, error: str, lacking: set[str]
) -> None:
    def check() -> str:
        raise ValueError(error)

    monkeypatch.setattr(doctor, "slow_checks", lambda *_: {"vLLM": check})
    line = by_name(host_lines(chosen, HOST))["vLLM"]
    assert (line.text, line.lacking) == (error, lacking)


def test_outboxes(chosen: NodeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outbox(path: Path) -> HostLine:
        return by_name(host_lines(replace_outbox(path), HOST))["outbox"]

    def replace_outbox(path: Path) -> NodeSettings:
        return NodeSettings(outbox=path)

    assert "there is no such folder" in outbox(tmp_path / "no" / "o.sqlite").text
    assert outbox(tmp_path / "no" / "o.sqlite").lacking == {"prove"}
    (other := tmp_path / "notes.txt").write_text("not an outbox at all" * 100)
    assert outbox(other).lacking == {"prove"}
    path = chosen.outbox
    path.touch()
    with hold_lock(path):
        assert "belongs to a server that runs now" in outbox(path).text
        assert outbox(path).lacking == set()
    monkeypatch.setattr(doctor, "free_disk_gib", lambda _path: 0.1)
    assert outbox(path).remedy == "free 2 GiB"


def test_keys(chosen: NodeSettings, tmp_path: Path) -> None:
    def keys(**changes: object) -> HostLine:
        return by_name(host_lines(NodeSettings(outbox=chosen.outbox, **changes), HOST))["keys"]

    assert keys(api_key="secret-key").text == "keys of operator-1 (operator)"
    assert "secret-key" not in keys(api_key="secret-key").text
    assert keys(api_keys_file=tmp_path / "none.toml").lacking == {"prove"}
    assert "open to every client" in keys(allow_anonymous=True).text


def test_the_command_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_OUTBOX", str(tmp_path / "outbox.sqlite"))
    file = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--json", str(file)])
    first, *lines = result.output.splitlines()
    assert first == "looking at this host ..."
    # A slow host says again that it looks.
    said = [line for line in lines if not line.startswith("looking")]
    assert [line.split()[0] for line in said] == [*NAMES, "this"]
    read = json.loads(file.read_text())
    assert result.exit_code == (0 if all(read["can"].values()) else 1)
    assert read["can"]["verify"]
    assert [each["name"] for each in read["findings"]] == NAMES
    assert read["facts"]["torch"]["version"]


def test_a_variable_that_is_not_valid_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_SHARE", "2")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert "POC_SHARE" in result.output
