"""Processes that use a store: one takes lanes until none is left, one leads until it is killed."""

import asyncio
import sys
from threading import Barrier

from proofserve.fleet.records import MemberSource
from proofserve.fleet.sql.locks import Leadership
from proofserve.fleet.sql.store import FleetStore
from proofserve.rounds.errors import Refused

from .support import give_lane


def give_lanes(url: str, round_id: str, giver: int, together: Barrier) -> list[int]:
    return asyncio.run(_give_lanes(url, round_id, giver, together))


async def _give_lanes(url: str, round_id: str, giver: int, together: Barrier) -> list[int]:
    taken: list[int] = []
    async with await FleetStore.open(url) as store:
        while True:
            name = f"g{giver}-{len(taken)}"
            member = await store.put_member(f"http://{name}", name, MemberSource.LIST)
            # Else one process might take all before another has begun.
            await asyncio.to_thread(together.wait, 60.0)
            try:
                lane = await give_lane(store, round_id, member.id)
            except Refused:
                return taken
            taken.append(lane.lane)


async def _lead(url: str) -> None:
    leadership = Leadership(url, interval_s=0.2, changed=lambda: print(leadership.held, flush=True))
    await leadership.run()


if __name__ == "__main__":
    asyncio.run(_lead(sys.argv[1]))
