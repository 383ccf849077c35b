"""Access by the settings: which clients may call, and on which addresses a server may listen."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from proofserve.api.access import Access
from proofserve.settings.node import NodeSettings
from proofserve.wiring.access import access_of, description, require_access_rule

FILE = """
[[key]]
name = "console"
key = "secret-of-console"
role = "operator"

[[key]]
name = "screen"
key = "secret-of-screen"
role = "viewer"

[[key]]
name = "auditor"
key = "secret-of-auditor"
role = "validator"
nonces_per_hour = 64
"""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API_KEY", "VIEWER_KEY", "VALIDATOR_KEY", "API_KEYS_FILE", "ALLOW_ANONYMOUS"):
        monkeypatch.delenv(f"POC_{name}", raising=False)


def test_keys_come_from_variables_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(FILE)
    monkeypatch.setenv("POC_API_KEY", "first, second")
    monkeypatch.setenv("POC_VIEWER_KEY", "third")
    monkeypatch.setenv("POC_VALIDATOR_KEY", "fourth")
    monkeypatch.setenv("POC_API_KEYS_FILE", str(file))
    access = access_of(NodeSettings())
    assert access.names == [
        "operator-1 (operator)",
        "operator-2 (operator)",
        "validator-1 (validator)",
        "viewer-1 (viewer)",
        "console (operator)",
        "screen (viewer)",
        "auditor (validator)",
    ]


def test_an_empty_variable_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_API_KEY", "")
    monkeypatch.setenv("POC_API_KEYS_FILE", "")
    assert access_of(NodeSettings()).names == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[key", "is not TOML"),
        ("", "key: Field required"),
        (FILE.replace("viewer", "vieewer"), r"key\.1\.role"),
        (FILE.replace("screen", "console", 1), "share a name"),
        (FILE.replace("secret-of-screen", "secret-of-console"), "equal"),
        (FILE.replace("secret-of-console", "secret of console"), r"key\.0\.key: .*letters, digits"),
        (FILE.replace("name", "nmae", 1), r"key\.0\.name"),
        (FILE.replace('"validator"', '"viewer"'), "nonces_per_hour is for the role validator"),
        (FILE.replace("64", "0"), r"key\.2\.nonces_per_hour"),
    ],
)
def test_a_file_that_is_not_valid_is_refused_without_showing_its_keys(
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


def test_keys_and_anonymous_clients_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="choose one"):
        access_of(NodeSettings(api_key="k", allow_anonymous=True))


def test_no_key_is_shown_by_the_settings_or_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POC_API_KEY", "hidden-key")
    assert "hidden-key" not in repr(NodeSettings())
    monkeypatch.setenv("POC_API_KEY", "hidden key")
    with pytest.raises(ValidationError, match="api_key") as caught:
        NodeSettings()
    assert "hidden" not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::", "10.0.0.1", "node.example"])  # noqa: S104
def test_a_server_for_other_machines_needs_a_key(host: str | None) -> None:
    with pytest.raises(ValueError, match="--poc-api-key"):
        require_access_rule(Access(), host)
    require_access_rule(access_of(NodeSettings(api_key="k")), host)
    require_access_rule(Access(open_to_all=True), host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_server_for_this_machine_needs_no_key(host: str) -> None:
    require_access_rule(Access(), host)


def test_the_log_says_who_may_call() -> None:
    assert "only clients on this machine" in description(Access())
    assert "every client" in description(Access(open_to_all=True))
    told = description(access_of(NodeSettings(viewer_key="hidden")))
    assert "viewer-1 (viewer)" in told
    assert "hidden" not in told
