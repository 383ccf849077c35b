"""How a day's chance to convict an honest member is spent over its verdicts.

A rule's ``alpha_per_day`` is that chance. Each verification gets a share of it when its job is
stored, before anything of its outcome is known. With ``spent`` the sum of the member's shares in
the 24 hours before, and n the number of them or, if greater, how many the policy plans for a day,
the share is

    (1 - spent) / (n + 2)

* No 24 hours hold shares of more than 1: the newest share in them is less than 1 - spent. The
  chance that one of their verdicts convicts an honest member is at most the sum of their alphas,
  however outcomes and samples depend on each other.
* There is always something left: without a plan the k-th share is 1 / (k (k + 1)), and after it
  1 / (k + 1) is left.
* A steady n verdicts a day get 1 / (2 n + 2) each.
"""

from typing import Final

DAY_S: Final = 86_400.0


def share_of_day(spent: float, verified: int, planned: int) -> float:
    """The share of the next verification of a member, above 0 and below 1.

    ``verified`` were begun in the last 24 hours with shares of ``spent`` in all; the policy plans
    ``planned`` for a day.
    """
    return (1.0 - spent) / (max(verified, planned) + 2)
