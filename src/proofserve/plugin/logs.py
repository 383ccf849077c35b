"""Our lines go where vLLM's go, in the form that it was told to write: text or JSON."""

import logging

ROOT = "proofserve"


def log_as(name: str) -> None:
    """Write our log by the handlers, the level and the propagation of the logger ``name``.

    Who has configured our own logger is left alone.
    """
    ours, theirs = logging.getLogger(ROOT), logging.getLogger(name)
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.handlers = list(theirs.handlers)
    ours.setLevel(theirs.level)
    ours.propagate = theirs.propagate
