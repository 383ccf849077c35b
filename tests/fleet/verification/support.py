"""Members that compute with the tiny model, policies, and workers as processes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from fleet.servers import FakeMember, RunningFleet, until
from proofserve.engines.checkpoints.facts import model_facts
from proofserve.engines.fake import FakeEngine
from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.rounds.records import EngineInfo, ProofBatch, Workload
from support.four_bits import engine_of
from support.models import TINY_THRESHOLD

SEQ_LEN = 32
ROUND: dict[str, Any] = {
    "block_hash": "block",
    "block_height": 7,
    "public_key": "key",
    "node_id": 0,
    "node_count": 1,
    "batch_size": 8,
    "params": {"model": "tiny", "seq_len": SEQ_LEN, "k_dim": 12},
}
RULE = f"every_sec = 0.2\nnonces = 12\ndist_threshold = {TINY_THRESHOLD}\np_mismatch = 0.01\n"


class TinyEngine(FakeEngine):
    """As the fake engine, with the vectors of a checkpoint, or of what 4 bits leave of it."""

    def __init__(self, model: Path, four_bits: bool) -> None:
        network = engine_of(model, "bfloat16", four_bits)
        facts = model_facts(model, network._network.facts.hidden_size)
        super().__init__(EngineInfo(("tiny",), facts, 512, {"vllm": "none"}))
        self._reference: ReferenceEngine = network
        self.latency_s = 0.1

    def _compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        return self._reference.compute(work, nonces)


@asynccontextmanager
async def tiny_members(
    folder: Path, model: Path, four_bits: Sequence[bool]
) -> AsyncIterator[list[FakeMember]]:
    """A member for each of ``four_bits``: honest for False."""
    made = [FakeMember(folder, f"m{number}") for number in range(len(four_bits))]
    try:
        for member, wrong in zip(made, four_bits, strict=True):
            member.engine = TinyEngine(model, wrong)
            await member.start()
        yield made
    finally:
        for member in made:
            await member.kill()


def a_policy(folder: Path, text: str = f"[default]\n{RULE}") -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    return file


class Worker:
    """``proofserve fleet worker`` as a process; its log is ``log``."""

    def __init__(self, folder: Path, database: str, model: Path, *options: str) -> None:
        self.log = folder / f"worker-{len(list(folder.glob('worker-*.log')))}.log"
        argv = ["fleet", "worker", "--database", database, "--model", str(model), *options]
        command = [sys.executable, "-c", "from proofserve.cli.main import app; app()", *argv]
        with self.log.open("ab") as log:
            # Threads would wait for each other, where other tests run.
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)

    async def until_said(self, text: str, seconds: float = 60.0) -> None:
        async def said() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return text in self.log.read_text()

        await until(said, seconds)


@contextmanager
def a_worker(folder: Path, database: str, model: Path, *options: str) -> Iterator[Worker]:
    worker = Worker(folder, database, model, *options)
    try:
        yield worker
    finally:
        worker.process.kill()
        worker.process.wait()


async def verdicts(fleet: RunningFleet) -> list[Any]:
    found: list[Any] = (await fleet.call("GET", "/api/v1/fleet/verdicts"))["verdicts"]
    return found


async def until_verdicts(fleet: RunningFleet, count: int, seconds: float = 60.0) -> list[Any]:
    async def enough() -> bool:
        return len(await verdicts(fleet)) >= count

    await until(enough, seconds)
    await asyncio.sleep(0)
    return await verdicts(fleet)
