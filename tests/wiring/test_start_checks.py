"""What a server needs before its model is loaded, check by check."""

import socket
import sqlite3
from pathlib import Path

import pytest

from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.node import NodeSettings
from proofserve.wiring.start_checks import start_checks

LOCAL = ("--host", "127.0.0.1", "--port", "0")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "VIEWER_KEY", "API_KEYS_FILE", "ALLOW_ANONYMOUS"):
        monkeypatch.delenv(f"POC_{name}", raising=False)


def check(name: str, *options: str, model: str = "model", **settings: object) -> str:
    chosen = NodeSettings(**{"enabled": True, **settings})  # type: ignore[arg-type]
    return start_checks(model, chosen, options)[name]()


@pytest.mark.parametrize("options", [["--host", "127.0.0.1"], ["--host=::1"], ["--uds", "/s"]])
def test_vllms_own_options_say_where_it_listens(options: list[str]) -> None:
    assert "this machine" in check("access", "-tp", "2", *options, "--enforce-eager")


@pytest.mark.parametrize("options", [[], ["--port", "80"], ["--host", "0.0.0.0"]])  # noqa: S104
def test_a_server_open_to_other_machines_without_a_key_does_not_start(options: list[str]) -> None:
    with pytest.raises(ValueError, match="have no key"):
        check("access", *options)
    check("access", *options, enabled=False)
    # vLLM alone reads this file; the plugin checks the access rule again.
    check("access", *options, "--config", "options.yaml")


@pytest.mark.parametrize("model", ["/no/where", "./nowhere", "no/such/folder", "~/nowhere"])
def test_a_model_folder_that_is_missing_is_named(model: str) -> None:
    with pytest.raises(ValueError, match=f"{model} does not exist"):
        check("model", model=model)


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "gpt2", "s3://bucket/some/model"])
def test_a_model_name_is_left_to_vllm(model: str) -> None:
    check("model", model=model)


def test_a_model_folder_is_accepted(tmp_path: Path) -> None:
    check("model", model=str(tmp_path))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=f"{port}: Address already in use; .*--port"):
            check("address", "--host", host, "--port", str(port))
        check("address", "--uds", "/socket")
    check("address", "--host", host, f"--port={port}")


@pytest.mark.parametrize("port", ["http", "70000"])
def test_a_port_that_is_no_port_is_named(port: str) -> None:
    with pytest.raises(ValueError, match=port):
        check("address", "--host", "127.0.0.1", "--port", port)


def test_an_entry_for_callbacks_that_is_not_valid_is_named() -> None:
    with pytest.raises(ValueError, match="POC_CALLBACK_ALLOW: 'everywhere'"):
        check("callbacks", callback_allow=("everywhere",))


def test_an_outbox_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite"
    with sqlite3.connect(path) as theirs:
        theirs.execute("CREATE TABLE t (x)")
    theirs.close()
    with pytest.raises(OutboxUnavailable, match="another program"):
        check("outbox", outbox=path)
    assert list(tmp_path.iterdir()) == [path]


def test_an_outbox_that_does_not_exist_yet_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "outbox.sqlite"
    assert "can be created" in check("outbox", outbox=path)
    assert not path.exists()


def test_receipts_without_a_node_are_refused() -> None:
    assert check("receipts") == "off"
    assert "48 dimensions" in check("receipts", receipts=True, receipts_k_dim=48)
    with pytest.raises(ValueError, match=r"--receipts needs .*--enable-poc"):
        check("receipts", receipts=True, enabled=False)


@pytest.mark.parametrize("option", [["--api-server-count", "2"], ["--api_server_count=3"]])
def test_receipts_with_several_processes_are_refused(option: list[str]) -> None:
    assert "dimensions" in check("receipts", "--api-server-count", "1", receipts=True)
    assert check("receipts", *option) == "off"
    with pytest.raises(ValueError, match="--api-server-count 1 or without --receipts"):
        check("receipts", *option, receipts=True)
