"""The demo of a fleet, whole: four real servers, and no process or file left."""

import re

import pytest

from support.demo import is_free, running_demo

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_the_demo_replaces_a_dead_server_and_convicts_one_that_cheats() -> None:
    with running_demo("fleet", "demo") as demo:
        assert demo.process.wait(800) == 0, demo.output
        lanes = re.findall(r"(server \d) has lane (\d)", demo.output)
        assert sorted(lanes) == [(f"server {n}", str(n - 1)) for n in (1, 2, 3, 4)]
        for server, verdict in (("1", "honest"), ("3", "fraud"), ("4", "honest")):
            assert re.search(rf"server {server} +{verdict} ", demo.output), demo.output
        assert re.search(r"Cordoned +server 3: convicted by verdict \w+: E = ", demo.output)
        assert re.search(r"Results +\d+ nonces of 4 lanes, none twice", demo.output)
        assert demo.processes() == []
        assert demo.leftovers() == []
        assert is_free(demo.port())
