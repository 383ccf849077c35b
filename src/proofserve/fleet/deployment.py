"""What a fleet serves, by what its members say of themselves."""

from collections.abc import Sequence
from dataclasses import replace

from proofserve.api.node import Deployment
from proofserve.fleet.members.conditions import MemberCondition
from proofserve.fleet.members.member_status import MemberDeployment
from proofserve.fleet.records import MemberState
from proofserve.protocol.model import AllowedTokens
from proofserve.protocol.scheme import ModelFacts
from proofserve.rounds.records import EngineInfo

_LEAST_TOKENS = 2


def fleet_deployment(
    found: Sequence[MemberCondition], limits: Deployment, version: str
) -> Deployment | None:
    """What every member that is not refused can do; None before the first one has answered.

    A fixed scheme, seq_len or k_dim is the same on all of them, because unequal ones are refused.
    ``limits`` has the fleet's own limits of requests, ``version`` is its version of proofserve.
    """
    deployed = [
        each.deployment
        for each in sorted(found, key=lambda each: (each.member.added_at, each.member.id))
        if each.state is not MemberState.REFUSED and each.deployment is not None
    ]
    if not deployed:
        return None
    first = deployed[0]
    return replace(
        limits,
        engine_info=EngineInfo(
            model_names=_common_names(deployed),
            facts=_facts(deployed),
            max_seq_len=min(each.max_seq_len for each in deployed),
            versions={**first.versions, "proofserve": version},
        ),
        scheme=first.scheme,
        seq_len=first.seq_len,
        k_dim=first.k_dim,
    )


def _common_names(deployed: Sequence[MemberDeployment]) -> tuple[str, ...]:
    """The names under which every member serves the model, in the order of the first one."""
    return tuple(
        name for name in deployed[0].models if all(name in each.models for each in deployed)
    )


def _facts(deployed: Sequence[MemberDeployment]) -> ModelFacts:
    # Only the number of token ids counts here: members draw prompts, the fleet does not.
    count = min(each.token_ids for each in deployed)
    tokens = AllowedTokens(((0, count),)) if count >= _LEAST_TOKENS else None
    first = deployed[0]
    return ModelFacts(first.hidden_size, first.weights_digest, tokens)
