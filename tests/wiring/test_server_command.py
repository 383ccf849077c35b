"""The command that starts vLLM's server, for one API process and for several."""

import pytest

from proofserve.wiring.launch import VLLM_SERVER, VLLM_SERVERS, server_command


def words(*options: str) -> tuple[str, ...]:
    """The module and its arguments."""
    return server_command("model", options, {}).argv[2:]


def test_one_process_is_served_by_vllms_own_module() -> None:
    for options in ((), ("--api-server-count", "1"), ("-tp", "2")):
        assert words(*options) == (VLLM_SERVER, "--model", "model", *options)


@pytest.mark.parametrize(
    "options",
    [
        ("--api-server-count", "2"),
        ("--api-server-count=2",),
        ("--api_server_count", "2"),
        ("-asc", "2"),
        ("-tp", "2", "--api-server-count", "3", "--enforce-eager"),
    ],
)
def test_several_processes_have_time_to_end(options: tuple[str, ...]) -> None:
    """vLLM alone would kill them right after SIGTERM."""
    assert words(*options) == (VLLM_SERVERS, "model", *options, "--shutdown-timeout", "20")


@pytest.mark.parametrize("given", [("--shutdown-timeout", "3"), ("--shutdown_timeout=3",)])
def test_the_operators_own_time_stays(given: tuple[str, ...]) -> None:
    options = ("--api-server-count", "2", *given)
    assert words(*options) == (VLLM_SERVERS, "model", *options)
