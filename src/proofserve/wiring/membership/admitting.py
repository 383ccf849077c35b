"""Who may join a fleet, and from where."""

from collections.abc import Awaitable, Callable

from proofserve.api.access import Access, ApiKey, Caller, Role
from proofserve.outbox.allowlist import Allowlist
from proofserve.outbox.transport import UrlCheck
from proofserve.settings.fleet import FleetSettings


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
    check = UrlCheck(allowlist(settings.join_allow, "FLEET_JOIN_ALLOW"))

    async def refusal(url: str) -> str | None:
        try:
            await check(url)
        except ValueError:
            allowed = ", ".join(settings.join_allow)
            return f"members may join from {allowed} only; --join-allow adds to that"
        return None

    return refusal


def allowlist(entries: tuple[str, ...], variable: str) -> Allowlist:
    """Raises ValueError, which names ``variable``."""
    try:
        return Allowlist(entries)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from None
