from collections.abc import AsyncIterator

import pytest

from api.support import Server, serving


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made
