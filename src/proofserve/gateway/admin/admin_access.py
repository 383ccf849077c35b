"""Who may operate the gateway: by the admin key, or without one anybody on this machine."""

import hmac
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from proofserve.gateway.failures import Failure
from proofserve.gateway.records import GatewayPlan

ADMIN_ONLY = Failure(
    403,
    "admin_only",
    "This needs the admin key, or a client on this machine where none is configured.",
)


def is_admin(plan: GatewayPlan, asking: HTTPConnection) -> bool:
    """Whether a request comes from somebody who may operate the gateway of ``plan``."""
    if plan.admin_key is None:
        return asking.client is not None and _is_loopback(asking.client.host)
    # In the bytes that came: a key may hold what is not ASCII.
    given = asking.headers.get("authorization", "").encode("latin-1")
    return hmac.compare_digest(given, f"Bearer {plan.admin_key}".encode())


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class AdminOnly:
    """An application that nobody else may reach, but for paths that ask for keys of their own.

    Those could not be called at all if they needed the admin key too: a request has one key.
    """

    def __init__(self, app: ASGIApp, plan: GatewayPlan) -> None:
        self._app = app
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an operator's request on."""
        app = self._app
        if scope["type"] == "http" and not self._may_pass(HTTPConnection(scope)):
            failure = ADMIN_ONLY
            app = Response(failure.body(), failure.status, media_type="application/json")
        await app(scope, receive, send)

    def _may_pass(self, asking: HTTPConnection) -> bool:
        # The path as the application routes it, so that no spelling means one here and one there.
        path: str = asking.scope["path"]
        return path.startswith(self._plan.self_guarded) or is_admin(self._plan, asking)
