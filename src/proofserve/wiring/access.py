"""Which clients may call a node and where its callbacks may go, by its settings.

It imports little, because `serve` uses it before vLLM starts.
"""

from collections.abc import Sequence

from proofserve.api.access import Access, Caller, CallLimits, Role, known_key
from proofserve.outbox.allowlist import Allowlist
from proofserve.outbox.sender import Outward
from proofserve.settings.node import ServiceSettings, node_keys
from proofserve.web import is_loopback

# Names the entries of a node in errors.
CALLBACK_ALLOW = "--poc-callback-allow / POC_CALLBACK_ALLOW"
# Where vLLM listens without --host.
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - refused below


def access_of(chosen: ServiceSettings) -> Access:
    """The keys of the variables, then those of the file. Raises ValueError if one is not valid."""
    given = {
        Role.OPERATOR: chosen.api_key,
        Role.VALIDATOR: chosen.validator_key,
        Role.VIEWER: chosen.viewer_key,
    }
    keys = [
        known_key(key.get_secret_value(), Caller(f"{role}-{number}", role))
        for role, of_role in given.items()
        for number, key in enumerate(of_role, 1)
    ]
    for each in node_keys(chosen.api_keys_file) if chosen.api_keys_file else ():
        limits = each.requests_per_minute, each.nonces_per_hour
        caller = Caller(each.name, Role(each.role), *limits)
        keys.append(known_key(each.key.get_secret_value(), caller))
    return Access(keys, chosen.allow_anonymous)


def call_limits(chosen: ServiceSettings) -> CallLimits:
    asked = chosen.requests_per_minute, chosen.max_open_waits
    return CallLimits(*asked, chosen.challenge_nonces_per_hour)


def require_access_rule(access: Access, host: str | None, is_unix_socket: bool = False) -> None:
    """Raise ValueError for a server that other machines reach without keys: all would get 403.

    ``host`` None means all addresses, as in vLLM.
    """
    if access.names or access.open_to_all or is_unix_socket:
        return
    listens_on = host or ALL_ADDRESSES
    if listens_on != "localhost" and not is_loopback(listens_on):
        raise ValueError(
            f"the proof endpoints would listen on {listens_on} and have no key: set POC_API_KEY"
            " (or --poc-api-key, POC_API_KEYS_FILE), or listen with --host 127.0.0.1, or allow"
            " every client with --poc-allow-anonymous"
        )


def outward_of(chosen: ServiceSettings, option: str) -> Outward:
    """Where callbacks may go. Raises ValueError that names the ``option``."""
    secret = chosen.callback_secret
    key = None if secret is None else secret.get_secret_value().encode()
    return Outward(allowlist_of(chosen.callback_allow, option), key)


def allowlist_of(entries: Sequence[str], option: str) -> Allowlist:
    try:
        return Allowlist(entries)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def description(access: Access) -> str:
    if access.names:
        return f"keys of {', '.join(access.names)}"
    if access.open_to_all:
        return "open to every client that reaches this server (--poc-allow-anonymous)"
    return "no key, so only clients on this machine may call"
