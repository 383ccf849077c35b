"""The processes of ``proofserve serve``: a parent that passes signals on, and vLLM's API server.

A terminal sends Ctrl-C to all processes of its group: engine and workers would end first, with a
traceback each. So the server runs in a session of its own, and the parent passes signals to the API
server alone, which ends its engine in order (ADR 19).
"""

import ctypes
import os
import runpy
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit code of a server that a signal ended before it was ready.
INTERRUPTED = 128 + signal.SIGTERM
# vLLM can lose a signal while it waits for its engine core to start, so the parent sends it again
# after so many seconds. A server that is ending already ignores it.
RESEND_S = 2.0
# Of prctl(2): the signal for a process whose parent has ended.
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the module that the first argument names, with the others, and end with its exit code.

    A signal during the start ends it with 128 and the signal's number: 130 after Ctrl-C.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    server = os.fork()
    if server == 0:
        _serve()
    received: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            os.kill(server, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, RESEND_S)

    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    pid, status = os.wait()
    while pid != server:
        # A container's first process also gets the end of orphans.
        pid, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    code = code if code >= 0 else 128 - code
    if received and code == INTERRUPTED:
        name = signal.Signals(received[0]).name
        sys.stderr.write(f"proofserve serve: the server ended during its start, after {name}\n")
        code = 128 + received[0]
    sys.exit(code)


def _serve() -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # KeyboardInterrupt, until vLLM sets a handler, which raises the same while the model loads.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        # A second SIGTERM would now interrupt Python's own exit, which waits for the engine.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(INTERRUPTED)
    sys.exit(0)


if __name__ == "__main__":
    main()
