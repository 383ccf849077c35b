"""The demo as a new user runs it: a real server, and no process or file left after any end."""

import re
import signal
import time

import pytest

from support.demo import is_free, running_demo

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("new_processes")]


@pytest.mark.timeout(1000)
def test_the_demo_tells_honest_from_forged_and_leaves_nothing() -> None:
    with running_demo("demo") as demo:
        assert demo.process.wait(900) == 0, demo.output
        lines = demo.output.splitlines()
        assert len([line for line in lines if not line.endswith(" ...")]) <= 35
        assert any("What is a nonce? - A nonce is a number." in line for line in lines)
        assert any("without proofs" in line and " ms a chat" in line for line in lines)
        assert any("with proofs:" in line and "8 of 8 identical" in line for line in lines)
        assert re.search(r"\d+ nonces/s", demo.output)
        assert re.search(r"nonce 2: [+-]\d\.\d\d", demo.output)
        # Each with the tests that agree on it.
        for what, verdict in (
            ("what this server produced", r"honest +\d+ +direction, footprint"),
            ("an honest node: vLLM on a GPU", r"honest +\d+ +direction, footprint"),
            ("a copy with 32 of 64 altered", r"fraud +\d+ +paired: errors are .*, E = "),
            ("another model's artifacts", r"fraud +\d+ +paired: errors are .*, E = "),
            # Errors are so long that sizes may say it first.
            ("4-bit weights", r"fraud +\d+ +(direction: int4 g128, E|paired: errors are \d)"),
            ("fp8 weights", r"fraud +\d+ +(direction: fp8 \S+ \S+, E|paired: errors are \d)"),
        ):
            (line,) = [line for line in lines if what in line]
            assert re.search(verdict, line), line
        assert any("6 answers: honest (signature, log, prompt, answer" in line for line in lines)
        assert any("one with another token: fraud (answer" in line for line in lines)
        assert demo.processes() == []
        assert demo.leftovers() == []
        assert is_free(demo.port())


@pytest.mark.parametrize(
    ("moment", "seconds", "number", "code"),
    [
        ("starting vLLM", 6.0, signal.SIGINT, 130),
        pytest.param(
            *("chatting while a round runs", 0.3, signal.SIGINT, 130), marks=pytest.mark.slow
        ),
    ],
    ids=["while the server starts", "during a round"],
)
def test_an_interrupted_demo_leaves_nothing(
    moment: str, seconds: float, number: signal.Signals, code: int
) -> None:
    with running_demo("demo") as demo:
        demo.wait_for(moment)
        time.sleep(seconds)
        assert len(demo.processes()) > 1
        demo.process.send_signal(number)
        assert demo.process.wait(90) == code, demo.output
        assert "Traceback" not in demo.output
        assert demo.processes() == []
        assert demo.leftovers() == []
        if "http://" in demo.output:
            assert is_free(demo.port())
