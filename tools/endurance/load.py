"""The load of a trial: chat, and rounds of both protocols in turn."""

from collections.abc import Callable

from proofserve.remote.chats import Call, chat, prompt
from proofserve.remote.records import AnyWork, DistanceWork, Work

ANSWER_TOKENS = 16
SEQ_LEN = 64
BATCH = 16


def endless_chat(model: str) -> Callable[[int], Call]:
    """A function that makes a short chat request of a number; each differs from all others."""
    return lambda number: chat(model, prompt(number), ANSWER_TOKENS)


def order(number: int, model: str, callback_url: str) -> AnyWork:
    """The order of round ``number``; every nonce of it gives a result."""
    block = f"block-{number}"
    kind = DistanceWork if number % 2 else Work
    return kind(model, block, seq_len=SEQ_LEN, batch_size=BATCH, callback_url=callback_url)
