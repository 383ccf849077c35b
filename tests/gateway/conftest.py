"""Gateways in the process of the tests."""

import pytest
from hypothesis import settings

# Property tests run on shared machines: no deadlines.
settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")


@pytest.fixture(autouse=True)
def quick_starts(no_collections: None) -> None:
    """One test turns collections on again: it is about them."""
