"""Gateways in the process of the tests."""

import pytest


@pytest.fixture(autouse=True)
def quick_starts(no_collections: None) -> None:
    """One test turns collections on again: it is about them."""
