"""Why a checkpoint cannot be a reference. The text is for whoever named it."""


class CheckpointError(Exception):
    """The checkpoint or the device cannot be used; the text says what to do."""
