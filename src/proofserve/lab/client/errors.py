"""What can go wrong while somebody else's server is being measured."""


class LabError(RuntimeError):
    """Root of this layer's errors. The text is for the person at the terminal."""


class NodeError(LabError):
    """The node refused a call or could not be reached; the text holds what it said."""


class TooSlowError(LabError):
    """Something that the measurement waits for did not happen in time."""
