"""What a request may ask of the engine before it changes anything."""

import contextlib

from proofserve.api.node import Node
from proofserve.rounds.errors import EngineFault


async def require_engine(node: Node) -> None:
    """Raises EngineGone. An engine that is merely slow or at fault gets its chance."""
    with contextlib.suppress(EngineFault):
        await node.manager.engine_gauges()
