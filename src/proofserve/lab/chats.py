"""Seeded chat requests: all different, all repeatable."""

import random

from proofserve.lab.load import Call

WORDS = tuple(
    """river stone window paper lantern forest copper thread harvest island mirror winter garden
    bridge candle anchor meadow valley orchard feather engine compass harbour whistle marble
    quiet bright narrow distant hollow gentle rapid ancient silver crooked patient early
    carries follows measures opens returns counts gathers crosses answers borrows""".split()  # noqa: SIM905
)


def chat(model: str, prompt: str, max_tokens: int, salt: str | None = None) -> Call:
    """A greedy chat of exactly ``max_tokens`` tokens.

    ``salt`` keeps vLLM's prefix cache from serving one run with what another has computed, which
    would change the shape of a prefill, and with it the last bits of the logits.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return Call("/v1/chat/completions", {**body, "cache_salt": salt} if salt else body)


def prompt(seed: int) -> str:
    """Between 8 and 24 words, the same ones for the same ``seed``."""
    draw = random.Random(seed)  # noqa: S311 - a text to talk about, not a secret
    return " ".join(draw.choices(WORDS, k=draw.randint(8, 24)))


def chats(model: str, seeds: range, max_tokens: int, salt: str) -> list[Call]:
    """A chat with the prompt of each seed."""
    return [chat(model, prompt(seed), max_tokens, salt) for seed in seeds]


def uneven_chat(model: str, number: int, mean_tokens: int) -> Call:
    """Chat ``number`` of an endless load; lengths vary by half around ``mean_tokens``.

    Clients that begin together would else end together, and a load of waves is not a steady one.
    """
    draw = random.Random(number)  # noqa: S311 - see above
    length = draw.randint(mean_tokens // 2, mean_tokens + mean_tokens // 2)
    return chat(model, f"{number} {prompt(number)}", length)
