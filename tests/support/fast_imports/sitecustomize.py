"""Every Python that a test starts imports this first, because its folder is on PYTHONPATH.

vLLM and torch make a million objects while they are imported. With its default thresholds, Python's
collector looks through them again and again, which is a quarter of the start of a server. Servers
of ours are watched by ``described``.
"""

import gc
import os
import sys

gc.set_threshold(100_000, 50, 100)

if "PROOFSERVE_TEST_FAULTS" in os.environ:
    from described import Watching

    sys.meta_path.insert(0, Watching())
