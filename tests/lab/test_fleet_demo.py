"""The demo of a fleet, whole: five real servers, and no process or file left."""

import re

import pytest

from support.demo import is_free, running_demo

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_the_demo_replaces_a_dead_server_and_members_find_one_that_cheats() -> None:
    with running_demo("fleet", "demo") as demo:
        assert demo.process.wait(800) == 0, demo.output
        lanes = re.findall(r"(server \d) has lane (\d)", demo.output)
        assert sorted(lanes) == [(f"server {n}", str(n - 1)) for n in range(1, 6)]
        same = r"honest +24 +its bits are those of [23] of [234] other\s+members"
        for server, found in (("1", same), ("3", same), ("4", "unproved "), ("5", same)):
            assert re.search(rf"server {server} +{found}", demo.output), demo.output
        why = r"Cordoned +server 4: unproved in 1 of its newest 20 jobs:\s+other bits: it says that"
        assert re.search(why, demo.output), demo.output
        assert re.search(r"Results +\d+ nonces of 5 lanes, none twice", demo.output)
        assert demo.processes() == []
        assert demo.leftovers() == []
        assert is_free(demo.port())
