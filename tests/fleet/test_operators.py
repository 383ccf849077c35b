"""What operators, viewers and members may ask of a fleet, and what they are told."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from fleet.servers import ROUND, RunningFleet, fleet_of, members
from proofserve.fleet.snapshot import JoinAnswer, MemberAnswer, SnapshotAnswer
from support.pace import until

pytestmark = pytest.mark.anyio

FLEET = "/api/v1/fleet"
WHY = {"reason": "a new driver"}
# What the dashboard reads of each member.
FIELDS = (
    "id name url state reason version model lane nonces_per_second processed last_step_s"
    " chat_wait_s outbox_age_s seen_s"
)


async def has(fleet: RunningFleet, name: str, **wanted: Any) -> bool:
    found = await fleet.member(name)
    return all(found[field] == value for field, value in wanted.items())


async def test_a_cordoned_member_keeps_its_lane_and_gets_no_new_one(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(8)
        id_ = (await fleet.member(made[0].url))["id"]
        answer = await fleet.call("POST", f"{FLEET}/members/{id_}/cordon", WHY)
        lane = (await fleet.member(made[0].url))["lane"]
        await fleet.pow("POST", "/stop")
        await fleet.pow("POST", "/init/generate", {**ROUND, "block_hash": "next"})
        await fleet.until_processed(8)
        next_lane = (await fleet.member(made[0].url))["lane"]
        back = await fleet.call("POST", f"{FLEET}/members/{id_}/uncordon")
        await until(lambda: has(fleet, made[0].url, lane=1))
        await fleet.pow("POST", "/stop")
    MemberAnswer.model_validate(answer)
    assert (answer["state"], answer["reason"]) == ("cordoned", "a new driver")
    assert lane is not None
    assert next_lane is None
    assert (back["state"], back["wish_reason"]) == ("ready", None)


async def test_a_drained_member_ends_its_lane_and_its_results_stay(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(20)
        drained = await fleet.member(made[0].url)
        await fleet.call("POST", f"{FLEET}/members/{drained['id']}/drain", WHY)
        await until(lambda: has(fleet, made[0].url, lane=None, state="draining"))
        state = made[0].node.manager.status().state
        count = len(set(made[0].proved()))
        await fleet.pow("POST", "/stop")
        nonces = set(await fleet.nonces())
    assert state == "STOPPED"
    assert len(set(made[0].proved())) == count
    assert drained["lane"] is not None
    assert any(nonce % 8 == drained["lane"] for nonce in nonces)


async def test_a_member_that_joined_can_be_removed_and_a_listed_one_not(tmp_path: Path) -> None:
    async with members(tmp_path, 2) as made, fleet_of(tmp_path, made[:1]) as fleet:
        joined = await fleet.call("POST", f"{FLEET}/members", {"url": made[1].url})
        await fleet.until_ready(2)
        listed = (await fleet.member(made[0].url))["id"]
        kept = await fleet.http.post(f"{FLEET}/members/{listed}/remove", json=WHY)
        gone = await fleet.call("POST", f"{FLEET}/members/{joined['id']}/remove", WHY)
        absent = await fleet.http.get(f"{FLEET}/members/{joined['id']}")
        left = (await fleet.call("GET", f"{FLEET}/members"))["members"]
    JoinAnswer.model_validate(joined)
    assert joined["state"] == "joining"
    assert kept.status_code == 409
    assert "list of members" in kept.json()["detail"]
    assert gone == {
        "id": joined["id"],
        "name": made[1].url.removeprefix("http://"),
        "removed": True,
    }
    assert absent.status_code == 404
    assert [each["id"] for each in left] == [listed]


async def test_the_snapshot_has_what_the_dashboard_shows_the_worst_first(tmp_path: Path) -> None:
    async with members(tmp_path, 3) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(8)
        await made[2].kill()
        await until(lambda: has(fleet, made[2].url, state="lost"))
        whole = await fleet.snapshot()
        page = await fleet.call("GET", f"{FLEET}/snapshot?offset=1&limit=1")
        await fleet.pow("POST", "/stop")
    SnapshotAnswer.model_validate(whole)
    assert set(FIELDS.split()) <= whole["members"][0].keys()
    assert whole["members"][0]["url"] == made[2].url
    assert whole["members"][0]["seen_s"] >= 2
    assert [each["id"] for each in page["members"]] == [whole["members"][1]["id"]]
    assert page["of_members"] == 3
    state = whole["fleet"]
    assert (state["state"], state["lanes_used"], state["lanes"]) == ("GENERATING", 3, 8)
    assert state["members"] == {
        **{"joining": 0, "ready": 2, "cordoned": 0, "draining": 0, "lost": 1, "refused": 0}
    }
    assert state["processed"] >= 8
    assert whole["members"][1]["model"] == "toy"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/members", {}, "url"),
        ("/members", {"url": "node:8000"}, "url"),
        ("/members", {"url": "http://127.0.0.1:1/v1"}, "url"),
        ("/members", {"url": "http://user:word@127.0.0.1:1"}, "url"),
        ("/members", {"url": "http://192.0.2.1:1"}, "url"),
        ("/members", {"url": "http://127.0.0.1:1", "name": ""}, "name"),
        ("/members", {"url": "http://127.0.0.1:1", "key": "x"}, "key"),
        ("/members/x/cordon", {}, "reason"),
        ("/members/x/drain", {"reason": "x" * 501}, "reason"),
        ("/members/x/remove", {"reason": 7}, "reason"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_field(
    fleet: RunningFleet, path: str, body: Any, field: str
) -> None:
    response = await fleet.http.post(f"{FLEET}{path}", json=body)
    assert response.status_code == 422
    assert [each["loc"] for each in response.json()["detail"]] == [["body", field]]


@pytest.mark.parametrize("what", ["cordon", "uncordon", "drain", "remove"])
async def test_an_unknown_member_is_not_found(fleet: RunningFleet, what: str) -> None:
    response = await fleet.http.post(f"{FLEET}/members/none/{what}", json=WHY)
    assert response.status_code == 404
    assert "none" in response.json()["detail"]


@pytest.fixture
async def fleet(tmp_path: Path) -> Any:
    running = RunningFleet(tmp_path, [])
    await running.start()
    yield running
    await running.kill()
    await running.http.aclose()


async def test_keys_decide_who_may_read_change_and_join(tmp_path: Path) -> None:
    keys = {"api_key": "operator", "viewer_key": "viewer", "join_key": "joiner"}
    fleet = RunningFleet(tmp_path, [], **keys)
    await fleet.start()
    body = {"url": "http://127.0.0.1:9"}

    async def status(method: str, path: str, key: str | None, json: Any = None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = await fleet.http.request(method, path, json=json, headers=headers)
        return response.status_code

    try:
        for path in (f"{FLEET}/snapshot", f"{FLEET}/members", "/api/v1/pow/status"):
            assert await status("GET", path, None) == 401
            assert await status("GET", path, "joiner") == 401
            assert await status("GET", path, "viewer") == 200
        join = f"{FLEET}/members"
        assert await status("POST", join, None, body) == 401
        assert await status("POST", join, "viewer", body) == 403
        assert await status("POST", join, "joiner", body) == 200
        assert await status("POST", join, "operator", body) == 200
        members_ = (await fleet.http.get(join, headers={"Authorization": "Bearer viewer"})).json()
        id_ = members_["members"][0]["id"]
        cordon = f"{FLEET}/members/{id_}/cordon"
        assert await status("POST", cordon, "joiner", WHY) == 401
        assert await status("POST", cordon, "viewer", WHY) == 403
        assert await status("POST", cordon, "operator", WHY) == 200
    finally:
        await fleet.kill()
        await fleet.http.aclose()


async def test_members_callbacks_must_be_signed_and_of_their_lane(tmp_path: Path) -> None:
    theirs, ours = {"callback_secret": "shared"}, {"member_secret": "shared"}
    async with members(tmp_path, 1, **theirs) as made, fleet_of(tmp_path, made, **ours) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(8)
        url = made[0].node.manager.status().spec.url
        unsigned = await fleet.http.post(f"{url}/generated", json={})
        await fleet.pow("POST", "/stop")
    assert unsigned.status_code == 401


async def test_a_callback_that_is_wrong_names_the_field(tmp_path: Path) -> None:
    async with members(tmp_path, 1) as made, fleet_of(tmp_path, made) as fleet:
        await fleet.pow("POST", "/init/generate", ROUND)
        await fleet.until_processed(8)
        await fleet.pow("POST", "/stop")
        row = (await fleet.results())[0]
        url = made[0].node.manager.status().spec.url
        body = {
            **{
                name: ROUND[name]
                for name in ("block_hash", "block_height", "public_key", "node_id")
            },
            "artifacts": [{"nonce": row["nonce"], "vector_b64": row["vector_b64"]}],
            "encoding": {"dtype": "f16", "k_dim": 12, "endian": "le"},
        }

        async def post(
            changed: Any, at: str = f"{url}/generated", key: str = "k"
        ) -> httpx.Response:
            return await fleet.http.post(at, json=changed, headers={"Idempotency-Key": key})

        stored = await post(body)
        repeated = await post(body)
        other_lane = await post(
            {**body, "artifacts": [{**body["artifacts"][0], "nonce": 1}]}, key="x"
        )
        width = await post({**body, "encoding": {**body["encoding"], "k_dim": 13}}, key="y")
        keyless = await fleet.http.post(f"{url}/generated", json=body)
        elsewhere = await post(body, f"{url[:-1]}7/generated")
        after = await fleet.results()
    assert (stored.json(), repeated.json()) == ({"status": "stored"}, {"status": "duplicate"})
    assert "artifacts" in str(other_lane.json()["detail"][0]["loc"])
    assert width.json()["detail"][0]["loc"] == ["body", "encoding"]
    assert keyless.json()["detail"][0]["loc"] == ["header", "Idempotency-Key"]
    assert [r.status_code for r in (other_lane, width, keyless, elsewhere)] == [422, 422, 422, 404]
    # The nonce was stored before: a second callback with it adds nothing.
    assert len(after) == len({each["nonce"] for each in after})
