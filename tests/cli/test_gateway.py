"""``proofserve gateway`` as an operator runs it."""

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from proofserve.cli import serve
from proofserve.cli.main import app
from proofserve.settings.gateway import PREFIX, GatewaySettings

FIELDS = GatewaySettings.model_fields


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[GatewaySettings]:
    """The settings that the gateway would serve with."""
    for name in FIELDS:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)
    seen: list[GatewaySettings] = []
    monkeypatch.setattr(serve, "run_gateway", seen.append)
    return seen


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, seen: list[GatewaySettings]) -> None:
    """The real check of the settings, without the server."""
    from proofserve.wiring.gateway import plan_of

    def check(chosen: GatewaySettings) -> None:
        plan_of(chosen)
        seen.append(chosen)

    monkeypatch.setattr(serve, "run_gateway", check)


def run(*args: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["gateway", *args], env=variables)


def said(result: Result) -> str:
    """The message on one line, without the frame around it."""
    return " ".join(result.output.replace("│", " ").split())


def test_help_lists_every_option_with_its_variable_in_full() -> None:
    result = run("--help", COLUMNS="80")
    assert result.exit_code == 0
    for name in FIELDS:
        assert f"--{name.replace('_', '-')} " in said(result)
        assert f"env var: {PREFIX}{name.upper()}" in said(result)


def test_help_shows_the_required_defaults() -> None:
    text = said(run("--help"))
    for variable, default in {
        "BACKEND_URL": "http://127.0.0.1:8001",
        "MAX_CONCURRENT_REQUESTS": "100",
        "REQUEST_TIMEOUT_SECONDS": "120.0",
        "QUEUE_WAIT_TIMEOUT_SECONDS": "60.0",
        "HOST": "0.0.0.0",  # noqa: S104
        "PORT": "7000",
    }.items():
        assert f"[env var: VLLM_{variable}; default: {default}]" in text


def test_every_option_has_a_help_text() -> None:
    assert [name for name, field in FIELDS.items() if not (field.description or "").strip()] == []


def test_without_options_the_gateway_uses_the_defaults(seen: list[GatewaySettings]) -> None:
    assert run().exit_code == 0
    assert seen == [GatewaySettings()]


def test_variables_are_read_and_options_win(seen: list[GatewaySettings]) -> None:
    variables = {"VLLM_PORT": "7001", "VLLM_QUEUE_WAIT_TIMEOUT_SECONDS": "2"}
    assert run("--port", "7002", "--backend-url", "http://b", **variables).exit_code == 0
    (chosen,) = seen
    assert (chosen.port, chosen.queue_wait_timeout_seconds) == (7002, 2)
    assert chosen.backend_url == "http://b"


def test_the_gateway_reads_switches_and_files(seen: list[GatewaySettings], tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    switches = ("--prefix-affinity", "--use-embedded-engine", "--model", "tiny")
    assert run(*switches, "--client-keys-file", file).exit_code == 0
    assert run(VLLM_PREFIX_AFFINITY="true", VLLM_USE_EMBEDDED_ENGINE="1").exit_code == 0
    assert [(each.prefix_affinity, each.use_embedded_engine) for each in seen] == [(True, True)] * 2
    assert seen[0].client_keys_file == Path(file)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--port", "70000"),
        ("--port", "http"),
        ("--max-concurrent-requests", "0"),
        ("--max-concurrent-requests", "1.5"),
        ("--queue-wait-timeout-seconds", "-1"),
        ("--queue-wait-timeout-seconds", "inf"),
        ("--request-timeout-seconds", "soon"),
        ("--gateway-workers", "0"),
        ("--max-body-bytes", "0"),
    ],
)
def test_a_bad_value_names_its_option_and_its_variable(
    option: str, value: str, seen: list[GatewaySettings]
) -> None:
    variable = PREFIX + option.removeprefix("--").replace("-", "_").upper()
    for result in (run(option, value), run(**{variable: value})):
        assert result.exit_code == 2
        assert option in said(result)
        assert variable in said(result)
        assert "Traceback" not in result.output
    assert seen == []


@pytest.mark.usefixtures("real")
def test_invalid_backends_are_refused_with_a_message(seen: list[GatewaySettings]) -> None:
    for args, words in [
        (["http://a:8001/v1"], "'http://a:8001/v1' is not a URL like http://127.0.0.1:8001"),
        (["http://a*none"], "'none' is not a weight of http://a"),
        (["http://a,http://a"], "names a backend twice"),
    ]:
        result = run("--backend-url", *args)
        assert result.exit_code == 2
        assert "VLLM_BACKEND_URL" in said(result)
        assert words in said(result)
    assert run("--backend-url", "http://a*2,http://b").exit_code == 0
    assert len(seen) == 1


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("[[client]]\nname = 'anna'\nkey = 'k'\nspeed = 1\n", "client.0.speed: Extra inputs"),
        ("[[client]]\nname = 'anna'\nkey = 'k'\n" * 2, "two clients share a name"),
        ("anna", "is not TOML"),
    ],
)
def test_an_invalid_file_of_keys_is_refused_with_a_message(
    text: str | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("keys.toml").write_text(text)
    result = run("--client-keys-file", "keys.toml")
    assert result.exit_code == 2
    assert "keys.toml" in said(result)
    assert words in said(result)
    # The message does not name an option --client, which does not exist.
    assert "VLLM_CLIENT " not in said(result)
