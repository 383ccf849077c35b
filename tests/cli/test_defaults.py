"""Who says neither scheme nor shape gets a round, a calibration and verdicts that fit."""

from typing import Any

import pytest
from typer.main import get_command

from proofserve.api.schemas import ARTIFACT_EXAMPLE, JOB_EXAMPLES, DistanceRoundRequest, Params
from proofserve.cli.main import app
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, default_k_dim
from proofserve.protocol.schemes import scheme
from proofserve.remote.records import Work
from proofserve_lab.orders import work_of_scheme

# ``calibrate noise`` and ``verify`` first ask their source: None.
COMMANDS = {
    "audit": SEQ_LEN,
    "bench chat-priority": SEQ_LEN,
    "bench generation": SEQ_LEN,
    "calibrate noise": None,
    "check coexist": SEQ_LEN,
    "check e2e": SEQ_LEN,
    "check smoke": SEQ_LEN,
    "verify": None,
}


def options_of(command: str) -> dict[str, Any]:
    """The options of a command by name, as typer's own parameters."""
    found: Any
    found, words = get_command(app), command.split()
    while words:
        _, found, words = found.resolve_command(found.context_class(found), words)
    return {each.name: each for each in found.params}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_default_of_a_command_is_the_one_default(command: str) -> None:
    options = options_of(command)
    assert options["seq_len"].default == COMMANDS[command]
    if "scheme" in options:
        assert options["scheme"].default in {None, DEFAULT_SCHEME}
    if "k_dim" in options:
        assert options["k_dim"].default is None
    if COMMANDS[command] is None and command != "verify":
        assert str(SEQ_LEN) in options["seq_len"].help


@pytest.mark.parametrize("name", ["artifact-v1", "artifact-v1-layers", "sketch-v1"])
def test_a_scheme_has_one_default_number_of_values(name: str) -> None:
    assert scheme(name).to_wire()["k_dim"] == default_k_dim(name)
    assert work_of_scheme(name, "m", SEQ_LEN).k_dim == default_k_dim(name)


def test_orders_and_examples_have_the_default_shape() -> None:
    assert DEFAULT_SCHEME == "artifact-v1"
    assert Params(model="m", seq_len=1).k_dim == Work("m").k_dim == default_k_dim(DEFAULT_SCHEME)
    assert DistanceRoundRequest.model_fields["seq_len"].default == Work("m").seq_len == SEQ_LEN
    for example in (ARTIFACT_EXAMPLE, *JOB_EXAMPLES):
        assert isinstance(example, dict)
        params, made_by = example["params"], example.get("scheme", DEFAULT_SCHEME)
        assert params == {"model": "toy", "seq_len": SEQ_LEN, "k_dim": default_k_dim(str(made_by))}
