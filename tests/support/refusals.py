"""Expecting a refusal with its reason."""

import pytest

from proofserve.rounds.errors import Refusal, Refused


def refused(reason: Refusal, match: str | None = None) -> "pytest.RaisesExc[Refused]":
    """A context that expects ``Refused`` for ``reason``, with a text that ``match`` finds."""
    return pytest.raises(Refused, match=match, check=lambda error: error.reason is reason)
