"""The error of a checkpoint that the reference engine cannot use."""


class CheckpointError(Exception):
    """The checkpoint or the device cannot be used; the text says what to do."""
