import pickle

import pytest

from proofserve.protocol.errors import IncompleteRecomputation, MalformedVector, ProtocolError


@pytest.mark.parametrize("kind", [ProtocolError, MalformedVector, IncompleteRecomputation])
def test_error_names_its_field_and_survives_a_process_border(kind: type[ProtocolError]) -> None:
    error = pickle.loads(pickle.dumps(kind("k_dim", "0 is below 1")))  # noqa: S301
    assert type(error) is kind
    assert isinstance(error, ValueError)
    assert error.field == "k_dim"
    assert str(error) == "k_dim: 0 is below 1"
