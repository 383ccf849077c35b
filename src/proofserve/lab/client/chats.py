"""Chat requests from seeds: every seed gives another prompt, and always the same one."""

import random

from proofserve.lab.client.load import Call

WORDS = tuple(
    """river stone window paper lantern forest copper thread harvest island mirror winter garden
    bridge candle anchor meadow valley orchard feather engine compass harbour whistle marble
    quiet bright narrow distant hollow gentle rapid ancient silver crooked patient early
    carries follows measures opens returns counts gathers crosses answers borrows""".split()  # noqa: SIM905
)

ANSWER_TOKENS = 16


def chat(model: str, prompt: str, max_tokens: int, salt: str | None = None) -> Call:
    """A greedy chat of exactly ``max_tokens`` tokens.

    With another ``salt``, vLLM's prefix cache does not use what an earlier run computed. That would
    change the shape of a prefill, and with it the last bits of the logits.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return Call("/v1/chat/completions", {**body, "cache_salt": salt} if salt else body)


def question(model: str, text: str, max_tokens: int) -> Call:
    """A greedy chat that ends where the model ends its answer, or after ``max_tokens`` tokens."""
    call = chat(model, text, max_tokens)
    return Call(call.path, {**call.body, "ignore_eos": False})


def prompt(seed: int) -> str:
    draw = random.Random(seed)  # noqa: S311 - a prompt, not a secret
    return " ".join(draw.choices(WORDS, k=draw.randint(8, 24)))


def chats(model: str, seeds: range, max_tokens: int, salt: str) -> list[Call]:
    return [chat(model, prompt(seed), max_tokens, salt) for seed in seeds]


def reading_chat(model: str, number: int, words: int, tokens: int = ANSWER_TOKENS) -> Call:
    """Chat ``number`` of an endless load: a long prompt and a short answer.

    Such a chat costs the engine much and the API process little, so that the engine is saturated
    on a small machine too. Lengths vary by half around ``words`` and ``tokens``; with equal lengths
    all clients would finish at the same time, and the load would come in waves.
    """
    draw = random.Random(number)  # noqa: S311 - see above
    text = " ".join(draw.choices(WORDS, k=_uneven(draw, words)))
    return chat(model, f"{number} {text}", _uneven(draw, tokens))


def _uneven(draw: random.Random, mean: int) -> int:
    return draw.randint(max(1, mean // 2), mean + mean // 2)
