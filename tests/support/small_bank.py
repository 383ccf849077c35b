"""A quarter of the emulated kernels and suspects, for tests to which it is the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest

from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.suspects import suspects_of
from proofserve.verifier import validator

# Our own, the exact one, the coarsest sums, a GPU's, and the two of this project's machines.
_KERNELS: Final = (
    *("torch", "float32", "sums of 32 in bfloat16", "vLLM on a GPU"),
    *("vLLM on x86 without bfloat16", "vLLM on x86 with bfloat16"),
)
_SUSPECTS: Final = (
    "int4 g128",
    "fp8 per channel",
    "int8 per channel",
    "int8 g32",
    "KV cache in fp8",
)


@contextmanager
def small_bank() -> Iterator[None]:
    """Validators that are made meanwhile, in this process, have no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validator, "PROFILES", {name: PROFILES[name] for name in _KERNELS})
        patch.setattr(validator, "suspects_of", _few)
        yield


def _few(network: Network) -> tuple[str, ...]:
    return tuple(name for name in suspects_of(network) if name in _SUSPECTS)
