"""Records results in a loop and prints a line after each call, until it is killed.

With ``roots`` as its second argument it writes a round that publishes roots.
"""

import asyncio
import sys
from pathlib import Path

from proofserve.outbox.store import SqliteOutbox
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import NonceLane
from proofserve.protocol.schemes import scheme
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.records import RoundSpec, Workload

BATCH = 32


async def write(path: Path, commits_roots: bool) -> None:
    work = Workload(scheme("artifact-v1"), Block("block", 7), "key", 256)
    lane = NonceLane(0, 1)
    spec = RoundSpec("r1", work, lane, BATCH, "http://127.0.0.1:9", commits_roots=commits_roots)
    async with await SqliteOutbox.open(path) as store:
        index = (await store.open_round(spec)).next_index
        while True:
            nonces = lane.batch(index, BATCH)
            index += BATCH
            done = [Claim(nonce, "A" * 32) for nonce in nonces[:-1]]
            await store.record("r1", index, done, {nonces[-1]: "not finite"})
            print(index, flush=True)
            # Another process that wants to write gets its turn.
            await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), "roots" in sys.argv[2:]))
