"""Deletes delivered results in the controller that leads, so that the database stays bounded."""

import asyncio
import logging

from proofserve.fleet.errors import StoreUnavailable
from proofserve.fleet.sql.store import FleetStore

_logger = logging.getLogger(__name__)

# Between two steps, so that new results have most of the database's time. Seconds.
_PAUSE_S = 0.05
_LONGEST_REST_S = 60.0


async def delete_for_ever(store: FleetStore, keep_s: float) -> None:
    """Delete what was delivered ``keep_s`` seconds ago, until cancelled."""
    while True:
        found = False
        try:
            found = await store.delete_delivered(keep_s)
        except StoreUnavailable as error:
            _logger.warning("delivered results are deleted later: %s", error)
        await asyncio.sleep(_PAUSE_S if found else min(_LONGEST_REST_S, keep_s / 4))
