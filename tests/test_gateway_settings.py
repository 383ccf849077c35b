"""The gateway's variables, their defaults, and the file of client keys."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from proofserve.gateway.records import ClientSpec
from proofserve.settings.gateway import PREFIX, GatewaySettings, client_keys

# Requirement 004.
REQUIRED = {
    "VLLM_BACKEND_URL": "http://127.0.0.1:8001",
    "VLLM_MAX_CONCURRENT_REQUESTS": 100,
    "VLLM_REQUEST_TIMEOUT_SECONDS": 120,
    "VLLM_QUEUE_WAIT_TIMEOUT_SECONDS": 60,
    "VLLM_HOST": "0.0.0.0",  # noqa: S104
    "VLLM_PORT": 7000,
    "VLLM_USE_EMBEDDED_ENGINE": False,
}
OTHER = {"VLLM_BACKEND_URL": "http://b:1", "VLLM_HOST": "::1", "VLLM_USE_EMBEDDED_ENGINE": True}


def field(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GatewaySettings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)


@pytest.mark.parametrize(("variable", "default"), REQUIRED.items())
def test_the_required_variables(
    variable: str, default: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(GatewaySettings(), field(variable)) == default
    other = OTHER.get(variable, 7)
    monkeypatch.setenv(variable, str(other))
    assert getattr(GatewaySettings(), field(variable)) == other


@pytest.mark.parametrize("text", ["true", "True", "1", "yes", "on"])
def test_the_embedded_engine_is_switched_on_in_any_usual_way(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_EMBEDDED_ENGINE", text)
    assert GatewaySettings().use_embedded_engine


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VLLM_PORT", "65536"),
        ("VLLM_PORT", "http"),
        ("VLLM_MAX_CONCURRENT_REQUESTS", "0"),
        ("VLLM_MAX_QUEUED_REQUESTS", "-1"),
        ("VLLM_QUEUE_WAIT_TIMEOUT_SECONDS", "0"),
        ("VLLM_QUEUE_WAIT_TIMEOUT_SECONDS", "inf"),
        ("VLLM_REQUEST_TIMEOUT_SECONDS", "nan"),
        ("VLLM_DRAIN_TIMEOUT_SECONDS", "-1"),
        ("VLLM_GATEWAY_WORKERS", "0"),
        ("VLLM_USE_EMBEDDED_ENGINE", "perhaps"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError, match=field(variable)):
        GatewaySettings()


CHOSEN = st.builds(
    GatewaySettings,
    port=st.integers(0, 65535),
    max_concurrent_requests=st.integers(1, 10**6),
    queue_wait_timeout_seconds=st.floats(0.001, 10**6),
    drain_timeout_seconds=st.floats(0, 10**6),
    prefix_affinity=st.booleans(),
    client_keys_file=st.sampled_from([None, Path("keys.toml"), Path("/a b/k,ü.toml")]),
    gateway_admin_key=st.one_of(
        st.none(), st.sampled_from(["a", "true", "7", "null", "schlüssel"])
    ),
    cors_origins=st.sampled_from(["", "*", "https://a, https://b"]),
    engine_options=st.sampled_from(["", "--max-model-len 64 --dtype 'float32'"]),
)


@settings(deadline=None)
@given(CHOSEN)
def test_workers_read_what_their_parent_has_written(chosen: GatewaySettings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in chosen.variables().items():
            patch.setenv(name, value)
        assert GatewaySettings() == chosen


KEYS = """
[[client]]
name = "anna"
key = "sk-anna"
concurrency = 4

[[client]]
name = "ben"
key = "sk-ben"
requests_per_minute = 60
tokens_per_minute = 100_000
"""


def test_clients_and_their_limits_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    assert client_keys(file) == (
        ClientSpec(name="anna", key="sk-anna", concurrency=4),
        ClientSpec(name="ben", key="sk-ben", requests_per_minute=60, tokens_per_minute=100_000),
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("concurrency = 4", "concurency = 4"), r"client\.0\.concurency: Extra inputs"),
        (('name = "ben"', 'name = "anna"'), "two clients share a name"),
        (('key = "sk-ben"', 'key = "sk-anna"'), "two clients share a key"),
        (('key = "sk-ben"', ""), r"client\.1\.key: Field required"),
        (('key = "sk-ben"', 'key = ""'), r"client\.1\.key: "),
        (("concurrency = 4", "concurrency = 0"), r"client\.0\.concurrency: .*greater than"),
        (("requests_per_minute = 60", "requests_per_minute = 0.5"), r"client\.1\.requests"),
        ((KEYS, "client = []"), r"client: "),
        ((KEYS, ""), r"client: Field required"),
        (("[[client]]", "[[clients]]"), r"client: Field required"),
        (('name = "anna"', "name = anna"), r"is not TOML: .*line 3"),
    ],
)
def test_a_file_that_cannot_be_meant_says_where(
    change: tuple[str, str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS.replace(*change))
    with pytest.raises(ValueError, match=words) as caught:
        client_keys(file)
    assert str(file) in str(caught.value)
    assert "sk-" not in str(caught.value)
    # Of the settings' own errors each is about an option.
    assert not isinstance(caught.value, ValidationError)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    for file, why in [(tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")]:
        with pytest.raises(ValueError, match=why) as caught:
            client_keys(file)
        assert str(file) in str(caught.value)
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not TOML"):
        client_keys(tmp_path / "latin")
