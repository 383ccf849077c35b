import os
import signal
from collections.abc import Callable

import pytest

from proofserve.cli.session import Interrupts


def strike(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_at_a_safe_point(number: int, code: int) -> None:
    def body() -> None:
        with Interrupts() as interrupts, interrupts.allowed():
            strike(number)
            raise AssertionError("went on")

    with pytest.raises(SystemExit) as caught:
        body()
    assert caught.value.code == code


@pytest.mark.parametrize(
    "safe_point", [lambda i: i.check(), lambda i: i.allowed().__enter__()], ids=["check", "allowed"]
)
def test_elsewhere_a_signal_waits_for_a_safe_point(
    safe_point: Callable[[Interrupts], None],
) -> None:
    went_on = []

    def body() -> None:
        with Interrupts() as interrupts:
            strike()
            went_on.append(True)
            safe_point(interrupts)
            raise AssertionError("went on")

    with pytest.raises(SystemExit) as caught:
        body()
    assert went_on
    assert caught.value.code == 130


def test_a_signal_waits_for_the_end_of_what_is_delayed() -> None:
    went_on = []

    def body() -> None:
        with Interrupts() as interrupts, interrupts.allowed():
            with interrupts.delayed():
                strike()
                went_on.append(True)
            raise AssertionError("went on")

    with pytest.raises(SystemExit) as caught:
        body()
    assert went_on
    assert caught.value.code == 130


def test_the_end_is_a_safe_point() -> None:
    with pytest.raises(SystemExit) as caught, Interrupts():
        strike()
    assert caught.value.code == 130


def test_cleanup_is_not_disturbed_by_another_signal() -> None:
    cleaned = []

    def body() -> None:
        with Interrupts() as interrupts:
            try:
                with interrupts.allowed():
                    strike()
            finally:
                strike()
                strike(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(SystemExit) as caught:
        body()
    assert cleaned
    assert caught.value.code == 130


def test_an_error_is_not_hidden_by_a_signal() -> None:
    def body() -> None:
        with Interrupts():
            strike()
            raise KeyError

    with pytest.raises(KeyError):
        body()


def test_the_earlier_signal_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
