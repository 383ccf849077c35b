"""Prompts of random words, which no server has cached."""

import random

WORDS = tuple(
    """river stone window paper lantern forest copper thread harvest island mirror winter garden
    bridge candle anchor meadow valley orchard feather engine compass harbour whistle marble
    quiet bright narrow distant hollow gentle rapid ancient silver crooked patient early
    carries follows measures opens returns counts gathers crosses answers borrows""".split()  # noqa: SIM905
)


def prompt(seed: int) -> str:
    draw = random.Random(seed)  # noqa: S311 - a prompt, not a secret
    return " ".join(draw.choices(WORDS, k=draw.randint(8, 24)))
