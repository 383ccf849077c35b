"""The two errors of a run."""


class Unusable(RuntimeError):
    """Nothing can be measured on this machine: the text says what is missing or wrong."""


class Skipped(RuntimeError):
    """One contestant cannot run: the text says why. The others still run."""
