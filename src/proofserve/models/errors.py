"""The ways in which writing a model can be refused. Nothing is left on disk in any of them."""


class ModelError(Exception):
    """Root of this package's errors. The text is for whoever asked for the model."""


class UnknownModelError(ModelError, ValueError):
    """An architecture, size or dtype that is not on offer; the text lists those that are."""


class DirectoryInUseError(ModelError, FileExistsError):
    """The target exists and is not an empty directory. It was not touched."""
