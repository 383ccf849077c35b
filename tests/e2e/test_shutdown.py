"""SIGTERM while clients stream chat, with vLLM's own time for them to finish.

``test_restarts.py`` has the end without such a time.
"""

import pytest

from support.node import ServedNode
from support.streams import BOUND_S, ends_with_an_error, payloads

pytestmark = pytest.mark.engine


def test_with_a_shutdown_timeout_short_chats_finish_and_long_ones_end_with_an_error(
    measured: ServedNode,
) -> None:
    """It ends the server, so it comes after the other tests of it."""
    with measured.streamed_chat(n=32) as long, measured.streamed_chat(max_tokens=20) as short:
        measured.server.process.terminate()
        assert payloads(short)[-1]["choices"][0]["finish_reason"] == "length"
        ends_with_an_error(long)
    assert measured.server.process.wait(BOUND_S) == 0
