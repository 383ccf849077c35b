"""What a worker makes of a job: a verdict by the tiny model, or an abstention."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleet.fake_member import FakeMember
from fleet.servers import ROUND, RunningFleet, fleet_of, receiving
from fleet.sql.support import a_job
from fleet.verification.support import RULE
from proofserve.engines.checkpoints import weights_digest
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import load, with_kernels
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification import MEMBERS_QUEUE, queue_name
from proofserve.fleet.verification_records import (
    JobFinding,
    StoredSample,
    VerdictOutcome,
    VerificationTask,
)
from proofserve.rounds.records import Deferred, ProofBatch, Workload
from proofserve.verifier.nodes import members
from proofserve.verifier.nodes.members import CheckpointTruths, check_sample
from proofserve.verifier.openings import open_sample
from proofserve.wiring.launch import free_port
from support.committed import fake_node
from support.fake_engine import TOY_ENGINE_INFO, FakeEngine
from support.four_bits import engine_of
from support.pace import until
from support.reference import Prover

pytestmark = pytest.mark.anyio

SEQ_LEN = 32


class TinyEngine(FakeEngine):
    """Proves with a checkpoint."""

    def __init__(self, model: Path, prover: Prover | None, processor: str) -> None:
        network = load(model, "bfloat16", "cpu")
        kernels = {"processor": processor}
        super().__init__(replace(TOY_ENGINE_INFO, facts=network.facts, kernels=kernels))
        self._reference = prover or Prover(network)

    async def answer(
        self, work: Workload, nonces: Sequence[int], core: int = 0
    ) -> ProofBatch | Deferred:
        self.calls_of[core].append(tuple(nonces))
        await asyncio.sleep(self.latency_s)
        return await asyncio.to_thread(self._reference.compute, work, nonces)


def checker_with(folders: dict[str, Path]) -> Callable[[VerificationTask], JobFinding]:
    return partial(check_sample, truth=CheckpointTruths(folders))


async def a_task(folder: Path) -> VerificationTask:
    """Eight made-up vectors, of which the job wants four."""
    async with await FleetStore.open(str(folder / "fleet.sqlite")) as store:
        job, _ = await a_job(store, replace(RULE, nonces=4))
        task = await store.verdicts.begin(job.id, "worker-a")
    assert task is not None
    return task


async def test_a_worker_that_cannot_compute_abstains(tmp_path: Path, tiny: Path) -> None:
    task = await a_task(tmp_path)
    queue = task.job.queue
    checker = checker_with({queue: tiny})
    absent = checker_with({"weights:bb": tiny})(task)
    few = checker(replace(task, job=replace(task.job, rule=replace(RULE, nonces=9))))
    assert {absent.outcome, few.outcome} == {VerdictOutcome.ABSTAINED}
    assert (absent.report, few.report) == (None, None)
    assert f"no checkpoint for {queue}; give it --model" in (absent.reason or "")
    assert few.reason == "too few nonces: the lane has 8 of 9"


async def test_a_member_that_does_not_show_what_it_owes_is_unproved(
    tmp_path: Path, tiny: Path
) -> None:
    task = await a_task(tmp_path)
    checker = checker_with({task.job.queue: tiny})
    other = checker(replace(task, job=replace(task.job, weights_digest="bb" * 32)))
    ours = replace(task, job=replace(task.job, weights_digest=weights_digest(tiny)))
    nothing = np.empty(0, np.int64), np.empty((0, 0), np.float16)
    absent = checker(replace(ours, sample=StoredSample(*nothing, of=8, missing=4)))
    found = (other, absent)
    assert {each.outcome for each in found} == {VerdictOutcome.UNPROVED}
    assert (other.reason or "").startswith("another digest: weights_digest: the source has bb")
    text = "not delivered: 4 of 4 drawn nonces of the lane have not come"
    assert (absent.reason, absent.report) == (text, None)
    # What has come still convicts.
    part = checker(replace(ours, sample=replace(task.sample, missing=1)))
    assert part.outcome is VerdictOutcome.FRAUD


@pytest.mark.parametrize("away", [True, False], ids=["away", "refuses"])
async def test_a_member_that_does_not_open_its_roots_is_unproved(
    tmp_path: Path, tiny: Path, away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(open_sample, patience_s=0.1)
    monkeypatch.setattr(members, "open_sample", impatient)
    with fake_node(tmp_path, api_key="its-key", key="its-key") as node:
        task = await a_task(tmp_path)
        source = {**ROUND, "params": {"seq_len": SEQ_LEN}, "group_id": 0, "n_groups": 1}
        root = {"first_index": 0, "count": 8, "root": base64.b64encode(bytes(32)).decode()}
        body = {**source, "scheme": "artifact-v1", "round_id": "r1"}
        body |= {"encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"}}
        body |= {"roots": [root | {"previous_root": None}]}
        sample = replace(task.sample, committed=(body,))
        address = f"http://127.0.0.1:{free_port()}" if away else node.url
        task = replace(task, sample=sample, member=replace(task.member, url=address))
        found = await asyncio.to_thread(checker_with({task.job.queue: tiny}), task)
    assert found.outcome is VerdictOutcome.UNPROVED
    assert (found.reason or "").startswith("not reached" if away else "refused")


async def test_made_up_vectors_are_fraud_by_the_right_weights(tmp_path: Path, tiny: Path) -> None:
    task = await a_task(tmp_path)
    task = replace(task, job=replace(task.job, weights_digest=weights_digest(tiny)))
    found = checker_with({task.job.queue: tiny})(task)
    assert found.outcome is VerdictOutcome.FRAUD
    assert found.nonces == len(found.distances) == 4
    assert found.distance is not None
    assert found.threshold is not None
    assert found.distance > found.threshold
    assert found.report is not None


@asynccontextmanager
async def tiny_members(
    folder: Path, tiny: Path, count: int, provers: Sequence[Prover | None] = ()
) -> AsyncIterator[list[FakeMember]]:
    """``provers`` are those of the first ones, where they are not all alike."""
    async with AsyncExitStack() as stack:
        made = [FakeMember(folder, f"m{number}") for number in range(count)]
        for member, prover in zip_longest(made, provers):
            member.engine = TinyEngine(tiny, prover, f"the processor of {member.name}")
            member.engine.latency_s = 0.2
            await member.start()
            stack.push_async_callback(member.kill)
        yield made


@pytest.mark.parametrize("is_fleet", [False, True], ids=["server", "fleet"])
async def test_a_lane_with_roots_is_opened_by_its_member(
    tmp_path: Path, tiny: Path, is_fleet: bool
) -> None:
    """Of a member that is a fleet, one of its rounds is."""
    inner = tmp_path / "inner"
    inner.mkdir()
    policy = tmp_path / "policy.toml"
    policy.write_text(
        f"[default]\nevery_nonces = 100000\nnonces = {RULE.nonces}\n"
        f"dist_threshold = {RULE.dist_threshold}\np_mismatch = {RULE.p_mismatch}\n"
    )
    body = {**ROUND, "commit": "roots", "params": {**ROUND["params"], "seq_len": SEQ_LEN}}
    async with AsyncExitStack() as stack:
        found_members = tiny_members(inner, tiny, 2 if is_fleet else 1)
        made: list[FakeMember | RunningFleet] = [*await stack.enter_async_context(found_members)]
        if is_fleet:
            made = [await stack.enter_async_context(fleet_of(inner, made))]
        receiver = await stack.enter_async_context(receiving(tmp_path))
        fleet = await stack.enter_async_context(fleet_of(tmp_path, made, policy=policy))
        await fleet.pow("POST", "/init/generate", {**body, "url": receiver.url})
        await fleet.until_processed(4 * RULE.nonces)
        await fleet.pow("POST", "/stop")
        id_ = (await fleet.snapshot())["members"][0]["id"]
        job = await fleet.call("POST", f"/api/v1/fleet/members/{id_}/verify")
        async with await FleetStore.open(str(tmp_path / "fleet.sqlite")) as store:
            task = await store.verdicts.begin(job["id"], "worker-a")
        assert task is not None
        checker = checker_with({job["queue"]: tiny})
        found = await asyncio.to_thread(checker, task)
    assert job["queue"] == queue_name(weights_digest(tiny), None)
    assert len(task.sample.nonces) == 0
    assert len({each["round_id"] for each in task.sample.committed}) == 1 + is_fleet
    assert found.outcome is VerdictOutcome.HONEST, found.reason
    assert found.nonces == len(found.distances) > 0


async def test_members_find_the_one_of_four_bits_and_it_is_cordoned(
    tmp_path: Path, tiny: Path
) -> None:
    """No node is trusted, and the worker has no weights."""
    policy = tmp_path / "policy.toml"
    policy.write_text(
        '[default]\nby = "members"\nevery_nonces = 100000\nnonces = 32\nconviction = "cordon"\n'
    )
    kernels = ("vLLM on x86 with bfloat16", "torch", "vLLM on a GPU")
    # Each has hooks of its own.
    networks = [load(tiny, "float32", "cpu") for _ in kernels]
    provers = [
        Prover(with_kernels(network, PROFILES[name]))
        for network, name in zip(networks, kernels, strict=True)
    ]
    provers.append(engine_of(tiny, "bfloat16", four_bits=True))
    body = {**ROUND, "params": {**ROUND["params"], "seq_len": SEQ_LEN}}
    async with AsyncExitStack() as stack:
        members = tiny_members(tmp_path, tiny, len(provers), provers)
        made = await stack.enter_async_context(members)
        receiver = await stack.enter_async_context(receiving(tmp_path))
        fleet = await stack.enter_async_context(fleet_of(tmp_path, made, policy=policy))
        await fleet.pow("POST", "/init/generate", {**body, "url": receiver.url})
        await fleet.until_each_stored(32)
        await fleet.pow("POST", "/stop")
        outcomes, reasons = {}, []
        async with await FleetStore.open(str(tmp_path / "fleet.sqlite")) as store:
            for each in (await fleet.snapshot())["members"]:
                path = f"/api/v1/fleet/members/{each['id']}/verify"
                job = await fleet.call("POST", path)
                assert job["queue"] == MEMBERS_QUEUE
                task = await store.verdicts.begin(job["id"], "worker-a")
                assert task is not None
                found = await asyncio.to_thread(checker_with({}), task)
                outcomes[each["url"]] = found.outcome
                reasons.append(found.reason)
                await store.verdicts.finish(task.job, found)

        async def cordoned() -> list[str]:
            members = (await fleet.snapshot())["members"]
            return [each["url"] for each in members if each["wish"] == "cordoned"]

        await until(cordoned)
        found_out = await cordoned()
    *honest, cheap = (member.url for member in made)
    assert outcomes.pop(cheap) is VerdictOutcome.FRAUD, reasons
    assert set(outcomes.values()) <= {VerdictOutcome.HONEST, VerdictOutcome.UNDECIDED}
    assert outcomes.keys() == set(honest)
    assert found_out == [cheap]
