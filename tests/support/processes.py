"""Processes that a test looks at from outside."""

import contextlib

import psutil


def has_ended(pid: int) -> bool:
    """Whether a process works no longer, even if nobody has asked for its exit status yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def have_ended(family: list[psutil.Process]) -> bool:
    return all(has_ended(process.pid) for process in family)
