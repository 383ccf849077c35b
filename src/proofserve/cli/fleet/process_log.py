"""The log of a controller and of a worker."""

import logging

# One line for each callback, and for each step of a migration, would be too many.
_ONLY_WARNINGS = ("httpx", "alembic")


def start_log() -> None:
    """Write lines of this process to stderr."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)
