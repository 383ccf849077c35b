"""proofserve's log lines go where vLLM's go, in the format that vLLM writes: text or JSON."""

import logging

ROOT = "proofserve"


def log_as(name: str) -> None:
    """Give proofserve's logger the handlers, level and propagation of the logger ``name``.

    A proofserve logger that is already configured stays as it is.
    """
    own, other = logging.getLogger(ROOT), logging.getLogger(name)
    if own.handlers or own.level != logging.NOTSET:
        return
    own.handlers = list(other.handlers)
    own.setLevel(other.level)
    own.propagate = other.propagate
