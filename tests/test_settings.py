"""Settings: the network's variables, their defaults, and VLLM_PLUGINS."""

import pytest
from pydantic import ValidationError

from proofserve.plugin.general import install
from proofserve.settings.node import EngineSettings, NodeSettings
from proofserve.settings.process import plugin_list

# Protocol B.8.
DEFAULTS = {
    "POC_CALLBACK_INTERVAL_SEC": 5,
    "POC_CALLBACK_MAX_ARTIFACTS": 1_000_000,
    "POC_CALLBACK_MAX_RETRIES": 10,
    "POC_CALLBACK_MAX_CONCURRENT": 10,
    "POC_CALLBACK_QUEUE_SIZE": 10_000,
    "POC_GENERATE_CHUNK_TIMEOUT_SEC": 60,
    "POC_GENERATE_RESULT_TTL_SEC": 300,
    "POC_MAX_QUEUED_NONCES": 100_000,
    "POC_RPC_TIMEOUT_MS": 60_000,
    "POC_BATCH_SIZE_DEFAULT": 32,
}
# Ours.
DEFAULTS |= {
    "POC_MAX_OPEN_WAITS": 64,
    "POC_MAX_BODY_BYTES": 32 * 1024 * 1024,
    "POC_REQUESTS_PER_MINUTE": 6000,
}


def field(variable: str) -> str:
    return variable.removeprefix("POC_").lower()


@pytest.mark.parametrize(("variable", "default"), DEFAULTS.items())
def test_the_networks_variables(
    variable: str, default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert getattr(NodeSettings(), field(variable)) == default
    monkeypatch.setenv(variable, str(default + 1))
    assert getattr(NodeSettings(), field(variable)) == default + 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("POC_BATCH_SIZE_DEFAULT", "2"),
        ("POC_SCHEME", "artifact-v9"),
        ("POC_CALLBACK_MAX_RETRIES", "-1"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError, match=field(variable)):
        NodeSettings()


def test_share_leaves_chat_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineSettings().share == 0.0
    monkeypatch.setenv("POC_SHARE", "1.0")
    with pytest.raises(ValidationError, match="share"):
        EngineSettings()


@pytest.mark.parametrize(("variable", "value"), [("POC_SHARE", "3"), ("POC_FORWARD_BATCH", "0")])
def test_the_plugin_refuses_a_bad_setting_before_vllm_starts_its_engine(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POC_ENABLED", raising=False)
    monkeypatch.setenv(variable, value)
    install()
    monkeypatch.setenv("POC_ENABLED", "1")
    with pytest.raises(ValueError, match=f"{variable}: Input should be"):
        install()


def test_plugins_of_others_stay_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin_list().split(",")[-1] == "proofserve"
    assert "lora_filesystem_resolver" in plugin_list()
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert plugin_list() == "theirs,proofserve"
