"""Verdicts over HTTP, by a real controller; a test takes the part of the worker."""

import base64
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.fleet.fake_member import Serving
from fleet.servers import ROUND, RunningFleet, fleet_of, members
from proofserve.fleet.snapshot import VerdictPage, VerdictReportAnswer, VerificationJobAnswer
from proofserve.fleet.sql.store import FleetStore
from proofserve.fleet.verification_records import JobFinding, MemberVerdict, VerdictOutcome
from proofserve.receiver.callbacks import SignatureCheck
from support.pace import until

pytestmark = pytest.mark.anyio

FLEET = "/api/v1/fleet"
# Only operators ask for verdicts: no test proves so many nonces.
RULE = "[default]\nevery_nonces = 100000\nnonces = 4\ndist_threshold = 0.03\np_mismatch = 0.01\n"
FRAUD = JobFinding(
    VerdictOutcome.FRAUD,
    seconds=0.5,
    reason="<script>alert(1)</script>",
    test="count",
    nonces=4,
    distance=0.5,
    threshold=0.03,
    distances=(0.5, 0.5, 0.5, 0.5),
    report={"lines": ["<b>too far</b>"], "distances": {"8": 0.5}},
)


@asynccontextmanager
async def proving(
    folder: Path, rule: str = RULE, **settings: Any
) -> AsyncIterator[tuple[RunningFleet, str]]:
    """A fleet with a policy, and the id of its one member, which has stored nonces."""
    policy = folder / "policy.toml"
    policy.write_text(rule)
    values = {"policy": policy, **settings}
    async with members(folder, 1) as made, fleet_of(folder, made, **values) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(8)
        await fleet.pow("POST", "/stop")
        yield fleet, (await fleet.member(made[0].url))["id"]


async def asked(fleet: RunningFleet, member_id: str) -> str:
    """The id of a new job about the member."""
    answer = await fleet.call("POST", f"{FLEET}/members/{member_id}/verify")
    VerificationJobAnswer.model_validate(answer)
    return str(answer["id"])


async def worked(folder: Path, job_id: str, found: JobFinding = FRAUD) -> MemberVerdict | None:
    """What a worker does to the database."""
    async with await FleetStore.open(str(folder / "fleet.sqlite")) as store:
        task = await store.verdicts.begin(job_id, "worker-a")
        assert task is not None
        assert task.sample.of >= 8
        await store.verdicts.finish(task.job, found)
        return await store.verdicts.finish(task.job, found)


async def jobs_are(fleet: RunningFleet, **wanted: int) -> bool:
    jobs = (await fleet.snapshot())["verification"]["jobs"]
    return all(jobs[state] == count for state, count in wanted.items())


async def is_cordoned(fleet: RunningFleet) -> bool:
    return bool((await fleet.snapshot())["members"][0]["state"] == "cordoned")


async def test_a_job_waits_for_a_worker_and_then_has_its_verdict(tmp_path: Path) -> None:
    async with proving(tmp_path, f'{RULE}conviction = "cordon"\n') as (fleet, member_id):
        job_id = await asked(fleet, member_id)
        await until(lambda: jobs_are(fleet, queued=1, running=0, failed=0))
        waiting = (await fleet.snapshot())["verification"]
        metrics = (await fleet.http.get(f"{FLEET}/metrics")).text
        early = await fleet.http.get(f"{FLEET}/verdicts/{job_id}")
        again = await worked(tmp_path, job_id)
        await until(lambda: jobs_are(fleet, queued=0, running=0))
        await until(lambda: is_cordoned(fleet))
        listed = await fleet.call("GET", f"{FLEET}/verdicts?member={member_id}&limit=1")
        of_another = await fleet.call("GET", f"{FLEET}/verdicts?member=another")
        beyond = await fleet.http.get(f"{FLEET}/verdicts?limit=501")
        one = await fleet.call("GET", f"{FLEET}/verdicts/{job_id}")
        page = await fleet.http.get(f"{FLEET}/verdicts/{job_id}/report")
        no_page = await fleet.http.get(f"{FLEET}/verdicts/other/report")
        shown = (await fleet.snapshot())["members"][0]
    assert again is None
    assert waiting["oldest_job_s"] >= 0.0
    outcomes = ("honest", "fraud", "undecided", "unproved", "abstained")
    assert waiting["verdicts"] == dict.fromkeys(outcomes, 0)
    assert 'proofserve_fleet_verification_jobs{state="queued"} 1.0' in metrics
    assert "proofserve_fleet_open_jobs 1.0" in metrics
    assert early.status_code == no_page.status_code == 404
    assert "its job may still run" in early.json()["detail"]
    VerdictPage.model_validate(listed)
    VerdictReportAnswer.model_validate(one)
    assert [each["id"] for each in listed["verdicts"]] == [job_id]
    assert of_another["verdicts"] == []
    assert beyond.status_code == 422
    assert (one["outcome"], one["cause"], one["worker"]) == ("fraud", "operator", "worker-a")
    assert one["report"] == FRAUD.report
    # The first one of a day without a plan gets half of its alpha.
    assert one["alpha"] == 0.5e-6
    assert "<td>5e-07</td>" in page.text
    assert shown["verdict"]["id"] == job_id
    assert shown["state"] == "cordoned"
    assert shown["reason"] == f"convicted by verdict {job_id}: {FRAUD.reason}"
    assert page.headers["content-type"].startswith("text/html")
    style = page.text.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert page.headers["content-security-policy"].startswith(
        f"default-src 'none'; style-src 'sha256-{digest}'"
    )
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page.text
    assert "&lt;b&gt;too far&lt;/b&gt;" in page.text
    assert "<script" not in page.text


async def test_a_member_without_rule_policy_or_nonces_is_not_verified(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(RULE.replace("[default]", '[[member]]\nname = "m0"'))
    fleet = RunningFleet(tmp_path, ["http://127.0.0.1:9", "http://127.0.0.1:10"])

    async def verify(id_: str) -> tuple[int, str]:
        response = await fleet.http.post(f"{FLEET}/members/{id_}/verify")
        return response.status_code, response.json()["detail"]

    async def both() -> bool:
        return len((await fleet.snapshot())["members"]) == 2

    try:
        await fleet.start()
        await until(both)
        ids = [(await fleet.member(f"http://127.0.0.1:{port}"))["id"] for port in (9, 10)]
        unknown, without_policy = await verify("none"), await verify(ids[0])
        await fleet.kill()
        policy.write_text(policy.read_text().replace("m0", "127.0.0.1:9"))
        await fleet.start(policy=policy)
        without_nonces, without_rule = await verify(ids[0]), await verify(ids[1])
    finally:
        await fleet.kill()
        await fleet.http.aclose()
    assert [each[0] for each in (unknown, without_policy)] == [404, 409]
    assert "--policy" in without_policy[1]
    assert [each[0] for each in (without_nonces, without_rule)] == [409, 409]
    assert "no stored vectors" in without_nonces[1]
    assert "no rule for this member" in without_rule[1]


async def test_viewers_read_verdicts_and_do_not_ask_for_them(tmp_path: Path) -> None:
    fleet = RunningFleet(tmp_path, [], api_key="operator", viewer_key="viewer")
    viewer = {"Authorization": "Bearer viewer"}
    await fleet.start()
    try:
        without = await fleet.http.get(f"{FLEET}/verdicts")
        read = await fleet.http.get(f"{FLEET}/verdicts", headers=viewer)
        asked_ = await fleet.http.post(f"{FLEET}/members/x/verify", headers=viewer)
    finally:
        await fleet.kill()
        await fleet.http.aclose()
    assert [each.status_code for each in (without, read, asked_)] == [401, 200, 403]


async def test_a_conviction_is_posted_once_and_signed(tmp_path: Path) -> None:
    arrivals: list[tuple[str, dict[str, Any]]] = []
    check = SignatureCheck(b"shared")

    async def network(scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        envelope, signature = check.headers(request)
        await check.body(envelope, signature, await request.body())
        arrivals.append((request.url.path, await request.json()))
        await JSONResponse({})(scope, receive, send)

    serving = Serving()
    await serving.start(network)
    rule = f'{RULE}conviction = "callback"\ncallback_url = "{serving.url}/about"\n'
    try:
        async with proving(tmp_path, rule, **{"callback_secret": "shared"}) as (fleet, member_id):
            job_id = await asked(fleet, member_id)
            await worked(tmp_path, job_id)

            async def delivered() -> bool:
                outbox = (await fleet.status())["outbox"]
                return bool(arrivals) and outbox["pending"] == 0

            await until(delivered)
            wish = (await fleet.snapshot())["members"][0]["wish"]
    finally:
        await serving.stop()
    ((path, body),) = arrivals
    assert path == "/about/convicted"
    assert (body["id"], body["member_id"], body["outcome"]) == (job_id, member_id, "fraud")
    assert wish == "active"
