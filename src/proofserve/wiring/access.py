"""Who may call a node and where its callbacks may go, as its settings say.

Light to import: `serve` asks before it makes way for the server.
"""

from argparse import ArgumentParser
from collections.abc import Sequence

from proofserve.api.access import Access, ApiKey, Caller, Role
from proofserve.outbox.allowlist import Allowlist
from proofserve.settings.node import BearerKeys, NodeKey, NodeSettings, node_keys
from proofserve.web.this_machine import is_loopback

# What vLLM takes for no --host at all.
EVERYWHERE = "0.0.0.0"  # noqa: S104 - we refuse it


class OpenToStrangers(ValueError):
    """The server would listen to other machines, and nothing says who may call."""


def access_of(chosen: NodeSettings) -> Access:
    """The keys of the variables, then those of the file.

    Raises:
        ValueError: the file cannot be read, or the settings contradict each other.
    """
    keys = [
        *_unnamed(chosen.api_key, Role.OPERATOR),
        *_unnamed(chosen.viewer_key, Role.VIEWER),
    ]
    if chosen.api_keys_file is not None:
        keys += [_named(each) for each in node_keys(chosen.api_keys_file)]
    return Access(keys, chosen.allow_anonymous)


def require_known_callers(access: Access, host: str | None, is_unix_socket: bool = False) -> None:
    """Raise OpenToStrangers for a server on ``host`` that anybody could try without a key.

    No host means all addresses, as vLLM has it. Requests are looked at all the same: this is for
    those who would find out only when their clients are refused.
    """
    if access.names or access.open_to_all or is_unix_socket:
        return
    listens_on = host or EVERYWHERE
    if listens_on != "localhost" and not is_loopback(listens_on):
        raise OpenToStrangers(
            f"the proof endpoints would listen on {listens_on} and have no key: give --poc-api-key"
            " (or POC_API_KEY, POC_API_KEYS_FILE), or listen with --host 127.0.0.1, or let"
            " everybody in with --poc-allow-anonymous"
        )


def require_known_callers_of(chosen: NodeSettings, vllm_options: Sequence[str]) -> None:
    """As ``require_known_callers``, before a server with ``vllm_options`` loads its model.

    Raises ValueError also as ``access_of`` does.
    """
    access = access_of(chosen)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--host", "--uds", "--config"):
        parser.add_argument(option)
    listening, _ = parser.parse_known_args(list(vllm_options))
    # What a file of options says is known once vLLM has read it.
    if chosen.enabled and listening.config is None:
        require_known_callers(access, listening.host, listening.uds is not None)


def allowlist_of(chosen: NodeSettings) -> Allowlist:
    """Where callbacks may go. Raises ValueError for an entry that cannot be meant."""
    try:
        return Allowlist(chosen.callback_allow)
    except ValueError as error:
        raise ValueError(f"--poc-callback-allow / POC_CALLBACK_ALLOW: {error}") from None


def words(access: Access) -> str:
    """Who may call, for the log."""
    if access.names:
        return f"keys of {', '.join(access.names)}"
    if access.open_to_all:
        return "open to everybody who can reach this server (--poc-allow-anonymous)"
    return "no key, so only clients on this machine may call"


def _named(key: NodeKey) -> ApiKey:
    caller = Caller(key.name, Role(key.role), key.requests_per_minute)
    return ApiKey(key.key.get_secret_value(), caller)


def _unnamed(keys: BearerKeys, role: Role) -> Sequence[ApiKey]:
    return [
        ApiKey(key.get_secret_value(), Caller(f"{role}-{number}", role))
        for number, key in enumerate(keys, 1)
    ]
