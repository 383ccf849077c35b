"""Finds the stretches of a load in which the machine stood still, so that nothing is blamed for it.

A machine that is short of memory or shared with others stops for half a second now and then: no
client sends, nobody answers. Chat does not saturate an engine in such a moment.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from proofserve.lab.client.load import Reply

# A proof that slips in between two steps of chat about doubles the longest pause of its window.
# Three times the usual is beyond what a node that gives way at all can be blamed for.
STALL = 3.0
# The share of windows that may be left out before there is nothing left to go by.
TOLERATED = 0.25


def longest_silence(replies: Sequence[Reply], began: float, ended: float) -> float:
    """Seconds of the longest time between two instants in which no reply arrived."""
    inside = sorted(reply.ended for reply in replies if began < reply.ended < ended)
    instants = [began, *inside, ended]
    return max(after - before for before, after in pairwise(instants))


def stall_s(silences: Sequence[float]) -> float:
    """The longest silence that is none, by those of windows in which nothing disturbed the load."""
    return STALL * median(silences)
