"""Who may call, as the settings say it, and where a server may listen."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from proofserve.api.access import Access
from proofserve.settings.node import NodeSettings, node_settings
from proofserve.wiring.access import (
    OpenToStrangers,
    access_of,
    require_known_callers,
    require_known_callers_of,
    words,
)

FILE = """
[[key]]
name = "desk"
key = "secret-of-desk"
role = "operator"

[[key]]
name = "screen"
key = "secret-of-screen"
role = "viewer"
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "VIEWER_KEY", "API_KEYS_FILE", "ALLOW_ANONYMOUS"):
        monkeypatch.delenv(f"POC_{name}", raising=False)


def test_keys_come_from_variables_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    monkeypatch.setenv("POC_API_KEY", "first, second")
    monkeypatch.setenv("POC_VIEWER_KEY", "third")
    monkeypatch.setenv("POC_API_KEYS_FILE", str(file))
    access = access_of(NodeSettings())
    assert access.names == [
        "operator-1 (operator)",
        "operator-2 (operator)",
        "viewer-1 (viewer)",
        "desk (operator)",
        "screen (viewer)",
    ]


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_API_KEY", "")
    monkeypatch.setenv("POC_API_KEYS_FILE", "")
    assert access_of(NodeSettings()).names == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[key", "no TOML"),
        ("", "key: Field required"),
        (FILE.replace("viewer", "vieewer"), r"key\.1\.role"),
        (FILE.replace("screen", "desk", 1), "share a name"),
        (FILE.replace("secret-of-screen", "secret-of-desk"), "equal"),
        (FILE.replace("secret-of-desk", "secret of desk"), r"key\.0\.key: .*letters, digits"),
        (FILE.replace("name", "nmae", 1), r"key\.0\.name"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_its_keys(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        access_of(NodeSettings(api_keys_file=file))
    assert "secret" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nowhere\.toml"):
        access_of(NodeSettings(api_keys_file=tmp_path / "nowhere.toml"))


def test_keys_and_everybody_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="choose one"):
        access_of(node_settings({"POC_API_KEY": "k", "POC_ALLOW_ANONYMOUS": "1"}))


def test_no_key_is_shown_by_the_settings_or_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_API_KEY", "hidden-key")
    assert "hidden-key" not in repr(NodeSettings())
    monkeypatch.setenv("POC_API_KEY", "hidden key")
    with pytest.raises(ValidationError, match="api_key") as caught:
        NodeSettings()
    assert "hidden" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.0.0.1", "node.example"])  # noqa: S104
def test_to_listen_to_strangers_needs_a_key(host: str | None) -> None:
    with pytest.raises(OpenToStrangers, match="--poc-api-key"):
        require_known_callers(Access(), host)
    require_known_callers(access_of(node_settings({"POC_API_KEY": "k"})), host)
    require_known_callers(Access(open_to_all=True), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_to_listen_to_this_machine_needs_none(host: str) -> None:
    require_known_callers(Access(), host)


ON = {"POC_ENABLED": "1"}


@pytest.mark.parametrize("options", [["--host", "127.0.0.1"], ["--host=::1"], ["--uds", "/s"]])
def test_vllms_own_options_say_where_it_listens(options: list[str]) -> None:
    require_known_callers_of(node_settings(ON), ["-tp", "2", *options, "--enforce-eager"])


@pytest.mark.parametrize("options", [[], ["--port", "80"], ["--host", "0.0.0.0"]])  # noqa: S104
def test_a_server_open_to_strangers_does_not_load_its_model(options: list[str]) -> None:
    with pytest.raises(OpenToStrangers):
        require_known_callers_of(node_settings(ON), options)
    require_known_callers_of(node_settings({}), options)
    # What a file of options says, vLLM alone knows; the plugin asks again.
    require_known_callers_of(node_settings(ON), [*options, "--config", "options.yaml"])


def test_the_log_says_who_may_call() -> None:
    assert "only clients on this machine" in words(Access())
    assert "everybody" in words(Access(open_to_all=True))
    told = words(access_of(node_settings({"POC_VIEWER_KEY": "hidden"})))
    assert "viewer-1 (viewer)" in told
    assert "hidden" not in told
