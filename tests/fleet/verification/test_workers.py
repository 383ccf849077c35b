"""Verdicts from a round to the database: real controllers, members and worker processes."""

from pathlib import Path

import pytest

from fleet.servers import fleet_of
from fleet.verification.support import ROUND, RULE, a_policy, a_worker, tiny_members, until_verdicts

pytestmark = pytest.mark.anyio


async def test_a_member_with_other_weights_is_convicted_and_cordoned(
    tmp_path: Path, tiny: Path
) -> None:
    policy = a_policy(tmp_path, f'[default]\n{RULE}conviction = "cordon"\n')
    database = str(tmp_path / "fleet.sqlite")
    async with (
        tiny_members(tmp_path, tiny, [False, True]) as made,
        fleet_of(tmp_path, made, policy=policy) as fleet,
    ):
        with a_worker(tmp_path, database, tiny) as worker:
            await worker.until_said("takes jobs")
            await fleet.pow("POST", "/init/generate", ROUND)
            found = await until_verdicts(fleet, 4)
            print(worker.log.read_text())
        print(found)
        print(await fleet.snapshot())
