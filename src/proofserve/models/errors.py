"""Why a model was not written. After each of these errors nothing is left on disk."""


class ModelError(Exception):
    """Root of this package's errors. The text is for the user of the command."""


class UnknownModelError(ModelError, ValueError):
    """An architecture, size or dtype that is not on offer; the text lists those that are."""


class DirectoryInUseError(ModelError, FileExistsError):
    """The target exists and is not an empty directory. It was not touched."""
