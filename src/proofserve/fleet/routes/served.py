"""The fleet as a ``Node``, for the routes of a node."""

from dataclasses import replace

from fastapi import Request

from proofserve.api.errors import NotReady
from proofserve.api.node import Deployment, Node
from proofserve.fleet.watch import FleetWatch

# A controller whose view is older does not know what is desired, and says so. Seconds.
OLDEST_VIEW_S = 5.0
# The call that needs no deployment, though it changes something.
_STOP = "/stop"


class ServedFleet:
    """Gives each request ``node`` with the present deployment.

    ``node`` has the deployment that counts while no member has answered yet.
    """

    def __init__(self, watch: FleetWatch, node: Node) -> None:
        self._watch = watch
        self._node = node
        self._made: tuple[Deployment, Node] | None = None

    def __call__(self, request: Request) -> Node:
        """Raises NotReady while the database, or the first member, does not answer."""
        node = self.for_operators(request)
        overview = self._watch.current
        waits_for_member = request.method == "POST" and not request.url.path.endswith(_STOP)
        if overview.deployment is None and waits_for_member:
            raise NotReady(overview.why_not_ready or "no member has answered yet")
        return node

    def for_operators(self, _request: Request) -> Node:
        """The node for calls that need no member. Raises NotReady without the database."""
        if self._watch.age_s > OLDEST_VIEW_S and self._watch.error is not None:
            raise NotReady(
                f"the fleet's database has not answered for {self._watch.age_s:.0f} s; members go"
                " on proving, and keep their results until it does"
            )
        deployment = self._watch.current.deployment
        if deployment is None:
            return self._node
        if self._made is None or self._made[0] is not deployment:
            self._made = (deployment, replace(self._node, deployment=deployment))
        return self._made[1]
