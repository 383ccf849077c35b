"""Small records of members, rounds and lanes."""

from dataclasses import replace
from typing import Any

from proofserve.fleet.client import look_of
from proofserve.fleet.members import MemberCondition, Rules, conditions
from proofserve.fleet.records import (
    DesiredState,
    FleetRound,
    Lane,
    Member,
    MemberLook,
    MemberSource,
    Wish,
)
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import Target
from proofserve.rounds.state import State
from rounds.doubles import round_spec

NOW = 1000.0
DIGEST, OTHER_DIGEST = "aa" * 32, "bb" * 32
DEPLOYED: dict[str, Any] = {
    "models": ["toy"],
    "max_seq_len": 512,
    "hidden_size": 64,
    "weights_digest": DIGEST,
    "token_ids": 200,
    "scheme": None,
    "seq_len": None,
    "k_dim": None,
    "max_nonces": 100_000,
    "versions": {"proofserve": "0.1.0", "vllm": "none"},
}
ROUND = FleetRound(2, round_spec("now", lane=NonceLane(1, 3)), 4, 900.0, None)
DISTANCE = FleetRound(
    2, round_spec("now", lane=NonceLane(1, 3), target=Target(1.4)), 4, 900.0, None
)
NOTHING, RULES = DesiredState(), Rules()
GENERATING = DesiredState(State.GENERATING, ROUND)
STOPPED = DesiredState(State.STOPPED, ROUND)


def lane(number: int = 0, round_id: str = "now", **changes: Any) -> Lane:
    values = {"member_id": "m", "given_at": 950.0, "member_round_id": f"theirs-{number}"}
    return Lane(**{"round_id": round_id, "lane": number, **values, **changes})


def config(number: int, round_: FleetRound = ROUND) -> dict[str, Any]:
    """What a member shows that proves lane ``number`` of ``round_``."""
    nonces, work = round_.nonces_of(number), round_.spec.work
    return {
        "block_hash": work.block.hash,
        "block_height": work.block.height,
        "public_key": work.public_key,
        "node_id": nonces.node_id,
        "node_count": nonces.node_count,
        "group_id": nonces.group_id,
        "n_groups": nonces.n_groups,
        "seq_len": work.seq_len,
        "scheme": work.scheme.name,
    }


def body(state: State = State.IDLE, **changes: Any) -> dict[str, Any]:
    """A member's answer to ``GET /status``."""
    silent = ("round_id", "config", "stats", "paused_reason", "error", "engine", "engine_error")
    nothing = dict.fromkeys((*silent, "outbox", "outbox_error"))
    known = {"status": state.value, "liveness": [], "deployment": DEPLOYED}
    return {**nothing, **known, **changes}


def proving(number: int = 0, state: State = State.GENERATING, **changes: Any) -> dict[str, Any]:
    """The answer of a member that has lane ``number`` of the round."""
    return body(state, round_id=f"theirs-{number}", config=config(number), **changes)


def seen(status: dict[str, Any] | None = None, **changes: Any) -> MemberLook:
    found = look_of(status or body(), changes.pop("clock_offset_s", 0.0), NOW - 1.0)
    return replace(found, **changes)


def member(last: MemberLook | None = None, id_: str = "m", **changes: Any) -> Member:
    values = {"wish": Wish.ACTIVE, "wish_reason": None, "added_at": 1.0, "seen": last}
    url = f"http://{id_}:8000"
    return Member(
        **{"id": id_, "name": id_, "url": url, "source": MemberSource.LIST, **values, **changes}
    )


def condition_of(
    one: Member, desired: DesiredState = NOTHING, *lanes: Lane, rules: Rules = RULES
) -> MemberCondition:
    return conditions_of([one], desired, lanes, rules)[0]


def conditions_of(
    made: list[Member], desired: DesiredState = NOTHING, lanes: Any = (), rules: Rules = RULES
) -> tuple[MemberCondition, ...]:
    return conditions(made, desired, lanes, rules, NOW)
