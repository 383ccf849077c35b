"""Errors of the lab, whose texts are shown to the user as they are."""


class LabError(RuntimeError):
    """Root of the lab's errors."""


class NodeError(LabError):
    """A node refused a call or could not be reached. The text holds the node's answer.

    ``status`` is that of the answer, None without one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class TooSlowError(LabError):
    """An event that a measurement waits for did not happen in time."""
