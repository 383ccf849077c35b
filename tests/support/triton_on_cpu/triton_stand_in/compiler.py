"""What Triton asks a backend's compiler for: that there is one."""

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):
    pass


# The interpreter calls nothing of it.
InterpretedBackend.__abstractmethods__ = frozenset()
