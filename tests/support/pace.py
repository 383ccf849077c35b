"""How slow this machine is beside the one on which the tests' bounds of time were chosen.

The processor's time of a small loop is not longer beside other processes, so it tells the machine
and not its load.
"""

import time
from typing import Final

_USUAL_S: Final = 0.027


def _measured() -> float:
    began = time.process_time()
    total = 0
    for number in range(400_000):
        total += number * number % 7
    return time.process_time() - began


PACE: Final = max(1.0, min(_measured() for _ in range(3)) / _USUAL_S)
"""What a bound is multiplied by; 1 on a machine that is as fast or faster."""
