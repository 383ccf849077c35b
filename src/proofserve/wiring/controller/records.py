"""Makes records for a controller's parts from its settings."""

import importlib.metadata
from collections.abc import Awaitable, Callable

from proofserve.api.access import Access, ApiKey, Caller, Role
from proofserve.api.node import Deployment
from proofserve.fleet.manager import FleetLimits
from proofserve.fleet.members.client import CallTimes
from proofserve.fleet.members.conditions import Rules
from proofserve.fleet.members.sources import DnsMembers
from proofserve.fleet.reconciler import MemberList
from proofserve.outbox.callbacks import CallbackPolicy
from proofserve.outbox.post import Allowlist, Outward, UrlCheck
from proofserve.protocol.scheme import ModelFacts
from proofserve.receiver.callbacks import SignatureCheck
from proofserve.rounds.limits import JobLimits, Limits
from proofserve.rounds.records import EngineInfo
from proofserve.settings.fleet import FleetSettings, listed_members


def member_list(settings: FleetSettings) -> MemberList:
    key = settings.member_key
    return MemberList(
        listed_members(settings),
        None if settings.dns is None else DnsMembers(settings.dns),
        None if key is None else key.get_secret_value(),
        CallTimes(look_s=settings.look_sec),
    )


def fleet_limits(settings: FleetSettings) -> FleetLimits:
    return FleetLimits(
        lanes=settings.lanes,
        start_wait_s=settings.start_wait_sec,
        stop_wait_s=settings.stop_wait_sec,
        node=Limits(jobs=JobLimits(max_queued_nonces=settings.max_queued_nonces)),
    )


def member_rules(settings: FleetSettings) -> Rules:
    return Rules(
        lost_after_s=settings.lost_after_sec,
        max_clock_offset_s=settings.max_clock_offset_sec,
        weights_digest=settings.weights_digest,
    )


def first_deployment(settings: FleetSettings, outward: Outward) -> Deployment:
    """The deployment while no member is known: no model, and the fleet's own limits."""
    nothing = EngineInfo(
        model_names=(),
        facts=ModelFacts(1),
        max_seq_len=1,
        versions={"proofserve": importlib.metadata.version("proofserve")},
    )
    return Deployment(
        engine_info=nothing,
        enabled=True,
        default_batch_size=settings.batch_size_default,
        max_nonces=settings.max_queued_nonces,
        max_callbacks=settings.callback_queue_size,
        max_body_bytes=settings.max_body_bytes,
        check_url=UrlCheck(outward.allowlist, outward.resolve),
    )


def outward_of(settings: FleetSettings) -> Outward:
    secret = settings.callback_secret
    key = None if secret is None else secret.get_secret_value().encode()
    return Outward(_allowlist(settings.callback_allow, "FLEET_CALLBACK_ALLOW"), key)


def _allowlist(entries: tuple[str, ...], variable: str) -> Allowlist:
    try:
        return Allowlist(entries)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None


def signature_check(settings: FleetSettings) -> SignatureCheck | None:
    secret = settings.member_secret
    return None if secret is None else SignatureCheck(secret.get_secret_value().encode())


def join_access(settings: FleetSettings, access: Access) -> Access:
    """The operators' keys and those for joining; without any key, as for every other call."""
    if not settings.join_key:
        return access
    joining = [
        ApiKey(key.get_secret_value(), Caller(f"join-{number}", Role.OPERATOR))
        for number, key in enumerate(settings.join_key, 1)
    ]
    return access.with_more(joining)


def join_check(settings: FleetSettings) -> Callable[[str], Awaitable[str | None]]:
    check = UrlCheck(_allowlist(settings.join_allow, "FLEET_JOIN_ALLOW"))

    async def refusal(url: str) -> str | None:
        try:
            await check(url)
        except ValueError:
            allowed = ", ".join(settings.join_allow)
            return f"members may join from {allowed} only; --join-allow adds to that"
        return None

    return refusal


def callback_policy(settings: FleetSettings) -> CallbackPolicy:
    return CallbackPolicy(
        max_retries=settings.callback_max_retries, max_concurrent=settings.callback_max_concurrent
    )
