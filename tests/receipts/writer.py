"""Stores receipts and prints a line after each, until it is killed. It never makes an entry."""

import asyncio
import sys
from pathlib import Path

from proofserve.outbox.receipts import signing_key
from proofserve.outbox.store import SqliteOutbox
from proofserve.rounds.receipts import ReceiptService
from receipts.support import an_answer
from support.fake_engine import FakeEngine


async def write(path: Path) -> None:
    async with await SqliteOutbox.open(path) as store:
        key = signing_key(path.with_suffix(".pem"))
        service = ReceiptService(FakeEngine(), store.receipts, key)
        n = 0
        while True:
            service._take([an_answer(f"chatcmpl-{n}")])
            await service._store()
            print(n, flush=True)
            n += 1


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1])))
