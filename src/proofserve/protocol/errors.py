"""What can be wrong with a protocol argument; every error names the argument at fault."""


class ProtocolError(ValueError):
    """An argument that the protocol does not allow.

    ``field`` is the name of the argument, ready to be shown to whoever sent it.
    """

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


class UnknownScheme(ProtocolError):
    """A scheme name that no recipe answers to."""


class IncompleteRecomputation(ProtocolError):
    """Our own side of a comparison has a gap, so no verdict may be given."""
