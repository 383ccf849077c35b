"""Chat requests from seeds, of which half are greedy."""

from collections.abc import Mapping
from typing import Any

from proofserve.lab.client.chats import prompt

TEMPERATURE = 1.0


def requests(model: str, seed: int, count: int, max_tokens: int) -> list[Mapping[str, Any]]:
    """``count`` requests; every second one is greedy. Other seeds give other prompts."""
    return [request(model, seed * count + n, max_tokens, greedy=n % 2 == 1) for n in range(count)]


def request(model: str, number: int, max_tokens: int, *, greedy: bool) -> Mapping[str, Any]:
    """A request for exactly ``max_tokens`` tokens.

    The parameters are stated, because a server may have other defaults.
    """
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt(number)}],
        "max_tokens": max_tokens,
        "temperature": 0.0 if greedy else TEMPERATURE,
        "top_p": 1.0,
        "top_k": 0,
        "ignore_eos": True,
    }
