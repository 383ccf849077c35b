"""Every Python that a test starts imports this first, because its folder is on PYTHONPATH.

vLLM and torch make a million objects while they are imported. With its default thresholds, Python's
collector looks through them again and again, which is a quarter of the start of a server.
"""

import gc

gc.set_threshold(100_000, 50, 100)
