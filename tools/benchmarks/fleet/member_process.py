"""Serves several members in one process: ``python -m benchmarks.fleet.member_process ...``.

It writes the URLs of its members to ``urls.json`` in its working folder once they all answer.
"""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.fleet.fake_member import FakeMember
from measuring.files import write_whole

URLS = "urls.json"


async def serve(folder: Path, count: int, call_s: float) -> None:
    """Serve ``count`` members for ever; a call of an engine takes ``call_s`` seconds."""
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(count):
            member = await started(folder, f"m{number}", call_s)
            stack.push_async_callback(member.kill)
            urls.append(member.url)
        write_whole(folder / URLS, json.dumps(urls))
        await asyncio.Event().wait()


async def started(folder: Path, name: str, call_s: float) -> FakeMember:
    """A member with the times of a node, not those of tests."""
    while True:
        member = FakeMember(folder, name, callback_interval_sec=5.0, callback_max_retries=0)
        member.engine.latency_s = call_s
        try:
            await member.start()
        except OSError:
            # Another process has taken its port meanwhile.
            await member.kill()
        else:
            return member


def main(
    count: Annotated[int, typer.Argument(help="members of this process")],
    call_s: Annotated[float, typer.Argument(help="seconds of an engine's call")],
) -> None:
    """Serve members over the fake engine until killed."""
    asyncio.run(serve(Path.cwd(), count, call_s))


if __name__ == "__main__":
    typer.run(main)
