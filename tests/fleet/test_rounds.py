"""Rounds of a fleet, over members that are real nodes with the fake engine."""

from pathlib import Path

import pytest

from fleet.servers import ROUND, fleet_of, members

pytestmark = pytest.mark.anyio


def lanes_of(nonces: list[int], total: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for nonce in nonces:
        found.setdefault(nonce % total, []).append(nonce // total)
    return found


async def test_a_round_over_three_members_has_disjoint_and_complete_lanes(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(60)
        running = await fleet.status()
        await fleet.pow("POST", "/stop")
        status, nonces = await fleet.status(), await fleet.nonces()
    assert running["status"] == "GENERATING"
    assert status["status"] == "STOPPED"
    assert len(set(nonces)) == len(nonces) == status["stats"]["total_processed"]
    lanes = lanes_of(nonces, 8)
    assert lanes.keys() == {0, 1, 2}
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in lanes.values())
    assert {int(lane): len(found) for lane, found in lanes.items()} == {
        int(lane): count for lane, count in status["lanes"]["processed"].items()
    }
    # Each nonce was proved by one member, and what it proved is what the fleet has.
    proved = [set(member.proved()) for member in made]
    assert all(set(nonces) & mine for mine in proved)
    assert not proved[0] & proved[1] | proved[0] & proved[2] | proved[1] & proved[2]
