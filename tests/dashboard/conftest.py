from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.browser import launched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with launched() as started:
        yield started
