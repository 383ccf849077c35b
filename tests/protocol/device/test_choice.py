"""Where the kernels run: on a CUDA device with a Triton that works, and nowhere else."""

import subprocess
import sys
from types import ModuleType

import pytest
import torch

from proofserve.protocol.device import kernels, kernels_for

CUDA = torch.device("cuda")


def test_other_devices_have_none() -> None:
    assert kernels_for(torch.device("cpu")) is None
    assert kernels_for(torch.device("meta")) is None


def test_a_cuda_device_has_them_where_tritons_driver_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "require_driver", lambda: None)
    assert kernels_for(CUDA) is kernels
    assert kernels_for(torch.device("cuda", 3)) is kernels


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, "gcc"),
        AssertionError("libcuda.so cannot found!"),
        ImportError("cannot open shared object file"),
        FileNotFoundError("/sbin/ldconfig"),
    ],
)
def test_a_triton_that_cannot_start_leaves_it_to_torch(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(kernels, "require_driver", fail)
    assert kernels_for(CUDA) is None


def test_this_machine_has_no_driver_and_says_so() -> None:
    if torch.cuda.is_available():
        kernels.require_driver()
    else:
        with pytest.raises(RuntimeError, match="active drivers"):
            kernels.require_driver()


def test_without_triton_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    package = sys.modules["proofserve.protocol.device"]
    monkeypatch.delattr(package, "kernels")
    monkeypatch.delitem(sys.modules, kernels.__name__)
    missing: ModuleType | None = None
    monkeypatch.setitem(sys.modules, "triton", missing)
    assert kernels_for(CUDA) is None
