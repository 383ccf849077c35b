"""Finds the windows of a load in which the machine stood still, so that they are not counted.

A machine that is short of memory or shared with other work stops now and then for up to half a
second: no client sends, no server answers, and the engine is idle. A proof may rightly run then.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from proofserve.lab.client.load import Reply

# A proof between two steps of chat about doubles the longest silence of its window. Three times the
# usual silence is more than that: a node that gives way to chat at all did not cause it.
STALL = 3.0
# The share of windows that may be left out; with more of them the others say too little.
TOLERATED = 0.25


def longest_silence(replies: Sequence[Reply], began: float, ended: float) -> float:
    """Seconds of the longest time without a reply in a window.

    A silence across the window's beginning counts from the reply before it: the engine may have
    computed a proof in a stall just before the window, which is stored inside the window.
    """
    last_before = max((reply.ended for reply in replies if reply.ended <= began), default=began)
    inside = sorted(reply.ended for reply in replies if began < reply.ended < ended)
    return max(later - earlier for earlier, later in pairwise([last_before, *inside, ended]))


def stall_s(usual: Sequence[float]) -> float:
    """Seconds above which a silence is a stall, from the silences of ordinary windows."""
    return STALL * median(usual)
