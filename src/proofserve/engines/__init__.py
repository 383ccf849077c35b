"""Deployed models that can prove their compute: one package or module per kind of engine."""


class CheckpointError(Exception):
    """The checkpoint or the device cannot be used; the text says what to do."""
