"""Every Python that a test starts imports this first, because its folder is on PYTHONPATH.

vLLM and torch make a million objects while they are imported. With its default thresholds, Python's
collector looks through them again and again, which is a quarter of the start of a server. Servers
of ours are watched by ``described``.

An engine core is a fork of the API server that has imported vLLM, as vLLM itself has it where no
setting asks for new processes. Its platform for CPUs does, because OpenMP's threads do not outlive
a fork, and each core would spend seven seconds of a processor on the same imports. Servers of
tests have one thread of OpenMP. Where ``PROOFSERVE_TEST_FORKS`` is not set, in the tests of the
demo and of restarts and on other machines, cores start as vLLM's platform chooses; so do engines
in the process of a test, which has threads of its own.
"""

import gc
import os
import sys
from typing import Any

gc.set_threshold(1_000_000, 50, 100)

if "PROOFSERVE_TEST_FAULTS" in os.environ:
    from described import Watching

    sys.meta_path.insert(0, Watching())

if "PROOFSERVE_TEST_FORKS" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1":
    import multiprocessing

    plain_context = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        """The one that forks for vLLM's ``get_mp_context``, for others the one they ask for."""
        if sys._getframe(1).f_code.co_name == "get_mp_context" and "pytest" not in sys.modules:
            method = "fork"
        return plain_context(method)

    multiprocessing.get_context = get_context
