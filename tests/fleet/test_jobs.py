"""Jobs of a fleet: split over its members, and whole whatever becomes of one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fleet.misbehaving import Misbehaving
from fleet.servers import (
    DISTANCE_ROUND,
    ROUND,
    FakeMember,
    Receiver,
    RunningFleet,
    fleet_of,
    members,
    receiving,
)
from proofserve.outbox.receipts import signing_key
from proofserve.wire.signed import ANSWER_HEADER, answer_with
from support.pace import until

pytestmark = pytest.mark.anyio

NONCES = list(range(200))
JOB: dict[str, Any] = {**ROUND, "nonces": NONCES, "wait": True}


async def test_a_job_is_divided_and_its_vectors_are_those_of_one_node(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made, fleet_of(tmp_path, made) as fleet:
        answer = await fleet.pow("POST", "/generate", JOB)
        shares = [len(set(member.proved())) for member in made]
        deep = await fleet.pow("GET", "/health/deep")
        alone = await fleet.http.post(f"{made[0].url}/api/v1/pow/generate", json=JOB)
    assert answer["artifacts"] == alone.json()["artifacts"]
    assert [each["nonce"] for each in answer["artifacts"]] == NONCES
    assert sum(shares) == len(NONCES)
    assert deep["status"] == "ok"
    assert min(shares) > 0


async def test_a_fleet_signs_what_it_answers_as_one_node(tmp_path: Path) -> None:
    key = signing_key(tmp_path / "fleet.key.pem")
    target = "/api/v1/pow/generate"
    async with members(tmp_path, 2) as made:
        async with fleet_of(tmp_path, made) as fleet:
            said = await fleet.http.post(target, json=JOB)
        async with fleet_of(tmp_path, made, key_file=tmp_path / "mine.pem") as fleet:
            again = await fleet.http.post(target, json=JOB)
    for response, of in (said, key), (again, signing_key(tmp_path / "mine.pem")):
        header, asked = response.headers[ANSWER_HEADER], response.request.content
        answer = answer_with(header, "POST", target, asked, response.content)
        assert answer.is_signed
        assert answer.public_key == of.public_key


async def test_claims_are_judged_by_all_members_together(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        artifacts = (await fleet.pow("POST", "/generate", JOB))["artifacts"]
        honest = await fleet.pow(
            "POST", "/generate", {**JOB, "validation": {"artifacts": artifacts}}
        )
        other = {**JOB, "public_key": "another", "validation": {"artifacts": artifacts}}
        forged = await fleet.pow("POST", "/generate", other)
    assert (honest["n_total"], honest["n_mismatch"]) == (len(NONCES), 0)
    assert not honest["fraud_detected"]
    assert forged["fraud_detected"]
    assert forged["n_mismatch"] == len(NONCES)


async def test_claims_are_judged_by_the_configured_round_of_the_fleet(tmp_path: Path) -> None:
    """Not by one that a member had configured before, for the same block."""
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        claims = {name: ROUND[name] for name in ("block_hash", "block_height", "public_key")}
        claims |= {"node_id": 0, "nonces": NONCES, "dist": [0.0] * len(NONCES)}
        found = []
        for flips in (True, False):
            changed = {**DISTANCE_ROUND, "use_sign_flips": flips}
            await fleet.pow("POST", "/init/validate", changed)
            found.append((await fleet.pow("POST", "/validate", claims))["computed_distances"])
            await fleet.pow("POST", "/stop")
    with_flips, without = found
    assert with_flips != pytest.approx(without, abs=1e-4)


async def test_a_nonce_that_is_not_finite_is_named(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        for member in made:
            member.engine.not_finite = frozenset({7})
        answer = await fleet.pow("POST", "/generate", JOB)
    assert [each["nonce"] for each in answer["failed"]] == [7]
    assert len(answer["artifacts"]) == len(NONCES) - 1


@pytest.mark.parametrize("fault", ["killed", "hangs", "fails"])
async def test_the_share_of_a_member_that_fails_goes_to_another(tmp_path: Path, fault: str) -> None:
    faults: list[Misbehaving] = []

    def around(app: Any) -> Misbehaving:
        faults.append(Misbehaving(app))
        return faults[-1]

    weak = FakeMember(tmp_path, "weak")
    weak.before = around
    await weak.start()
    try:
        async with members(tmp_path, 1) as made, fleet_of(tmp_path, [*made, weak]) as fleet:
            weak.engine.latency_s = 0.2
            proving = asyncio.create_task(fleet.pow("POST", "/generate", JOB))
            await until(lambda: has_begun(weak))
            if fault == "killed":
                await weak.serving.stop()
            elif fault == "hangs":
                faults[0].hangs = True
                weak.engine.latency_s = 3600.0
            else:
                weak.engine.faults = 1
            answer = await proving
    finally:
        weak.engine.latency_s = 0.0
        await weak.kill()
    assert [each["nonce"] for each in answer["artifacts"]] == NONCES
    assert set(made[0].proved()) == set(NONCES)


async def has_begun(member: FakeMember) -> bool:
    return bool(member.engine.calls)


async def test_without_a_ready_member_the_reason_of_each_is_the_answer(tmp_path: Path) -> None:
    fleet = RunningFleet(tmp_path, [])
    await fleet.start()
    try:
        status = await fleet.http.get("/api/v1/pow/status")
        none = await fleet.http.post("/api/v1/pow/generate", json=JOB)
        body = {"url": "http://127.0.0.1:9", "name": "absent"}
        await fleet.call("POST", "/api/v1/fleet/members", body)
        await until(lambda: has_reason(fleet, "has not answered"))
        absent = await fleet.http.post("/api/v1/pow/init/generate", json=ROUND)
        stopped = await fleet.http.post("/api/v1/pow/stop")
        ready = await fleet.http.get("/api/v1/pow/health/ready")
    finally:
        await fleet.kill()
        await fleet.http.aclose()
    assert status.status_code == 200
    assert none.status_code == absent.status_code == ready.status_code == 503
    assert "the fleet has no member" in none.json()["detail"]
    assert "absent is joining: has not answered yet" in absent.json()["detail"]
    assert "absent" in ready.json()["detail"]["engine"]
    assert stopped.status_code == 200


async def has_reason(fleet: RunningFleet, text: str) -> bool:
    members_ = (await fleet.snapshot())["members"]
    return any(text in (each["reason"] or "") for each in members_)


async def test_a_job_waits_for_the_end_of_a_round_and_is_whole(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        for member in made:
            member.engine.latency_s = 3.0
        job = {**JOB, "wait": False}
        before = (await fleet.pow("POST", "/generate", job))["request_id"]
        await until(lambda: has_begun(made[0]))
        proving = asyncio.create_task(fleet.pow("POST", "/generate", JOB))
        await fleet.pow("POST", "/init/generate", {**ROUND, "block_hash": "other"})
        for member in made:
            member.engine.latency_s = 0.01
        await fleet.until_processed(20)
        assert not proving.done()
        await fleet.pow("POST", "/stop")
        cancelled = await fleet.pow("GET", f"/generate/{before}")
        answer = await proving
    assert cancelled["status"] == "cancelled"
    assert [each["nonce"] for each in answer["artifacts"]] == NONCES


async def test_a_job_without_wait_calls_back(tmp_path: Path) -> None:
    async with (
        members(tmp_path, 2) as made,
        receiving(tmp_path) as receiver,
        fleet_of(tmp_path, made) as fleet,
    ):
        job = {**JOB, "wait": False, "url": receiver.url}
        await fleet.pow("POST", "/generate", job)
        await until(lambda: received(receiver, len(NONCES)))


async def received(receiver: Receiver, count: int) -> bool:
    sources = receiver.store.summary().sources
    return bool(sources) and sources[0].artifacts == count
