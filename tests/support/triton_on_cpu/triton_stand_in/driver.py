"""What Triton asks a backend's driver for, as far as the interpreter goes."""

from triton.backends.driver import DriverBase


class InterpretedDriver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True


# The interpreter calls nothing else of it.
InterpretedDriver.__abstractmethods__ = frozenset()
