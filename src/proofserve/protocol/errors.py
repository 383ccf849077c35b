"""Errors of protocol arguments; every error names the argument."""


class ProtocolError(ValueError):
    """An argument that the protocol does not allow; ``field`` is its name, as the API shows it."""

    def __init__(self, field: str, message: str) -> None:
        # Both go to ValueError as they are: an exception is rebuilt from its args when it is
        # unpickled, and these cross process boundaries.
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class MalformedVector(ProtocolError):
    """A text that is not exactly one encoded vector of the expected length."""


class IncompleteRecomputation(ProtocolError):
    """The validator's own recomputation is incomplete, so no verdict may be given."""
