"""Answers that must be asked for until a cheap writer is convicted.

``python -m benchmarks.asked`` prints the table of ``docs/receipts.md``: an asker is recognised with
a chance of ``known``, and a share of the other answers is cheap. Answers change the log of the
evidence by normal numbers.
"""

import sys
from typing import Final

import numpy as np

# Of int4 g128 on the trained model, sampled answers of 64 tokens: what a cheap answer adds to the
# evidence in the mean, what an honest one takes away, and their spread (nats).
GAIN: Final = 1.3
LOSS: Final = 1.1
SPREAD: Final = 1.6
CHEAP: Final = (1.0, 0.5, 0.2)
KNOWN: Final = (0.0, 0.5, 0.8)
# As in the test of tokens: shares that the evidence bets on, and what convicts (e^-17.4 is 3e-8).
SHARES: Final = (1.0, 0.4, 0.1)
CONVICTS: Final = 17.4
RUNS: Final = 200
ANSWERS: Final = 20_000


def needed(known: float, cheap: float, draw: np.random.Generator) -> float:
    """The median of the answers asked for until a conviction."""
    found = []
    for _ in range(RUNS):
        is_cheap = draw.random(ANSWERS) < (1 - known) * cheap
        gains, losses = (draw.normal(mean, SPREAD, ANSWERS) for mean in (GAIN, -LOSS))
        ratio = np.where(is_cheap, gains, losses)
        bets = [
            np.logaddexp(np.log1p(-share), np.log(share) + ratio) if share < 1 else ratio
            for share in SHARES
        ]
        total = np.logaddexp.reduce([np.cumsum(bet) for bet in bets]) - np.log(len(SHARES))
        over = total > CONVICTS
        found.append(over.argmax() + 1 if over.any() else np.inf)
    return float(np.median(found))


def main() -> None:
    draw = np.random.default_rng(0)
    for cheap in CHEAP:
        row = (f"{needed(known, cheap, draw):,.0f}" for known in KNOWN)
        sys.stdout.write(f"| {cheap:g} | {' | '.join(row)} |\n")


if __name__ == "__main__":
    main()
