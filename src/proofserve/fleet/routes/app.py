"""The application of a fleet: a node's routes, and those of its operators and members."""

from typing import Any

from fastapi import APIRouter, FastAPI

from proofserve.api import node_page
from proofserve.api import routes as node_routes
from proofserve.api.node import ServedNode
from proofserve.api.requests import guarded
from proofserve.fleet.routes import callbacks, operators, verdicts
from proofserve.fleet.routes.operators import FleetParts
from proofserve.fleet.routes.served import ServedFleet
from proofserve.receiver.callbacks import SignatureCheck


def create_app(
    parts: FleetParts, served: ServedFleet, check: SignatureCheck | None, has_keys: bool
) -> FastAPI:
    """``check`` is that of members' callbacks, None without a secret."""
    app = FastAPI(title="proofserve fleet")
    app.include_router(callbacks.router(parts.store, parts.manager.totals, check))
    app.include_router(operators.router(parts, served.for_operators))
    app.include_router(verdicts.router(parts, served.for_operators))
    app.include_router(node_routes.router(served, has_keys))
    app.include_router(node_page.router(served.for_operators))
    models = APIRouter(route_class=guarded(served), tags=["fleet"])

    @models.get("/v1/models")
    async def list_models(node: ServedNode) -> dict[str, Any]:
        """The names of the model that the members serve. Chat itself goes to their gateway."""
        names = node.deployment.engine_info.model_names
        data = [{"id": name, "object": "model", "owned_by": "proofserve"} for name in names]
        return {"object": "list", "data": data}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """The process answers. GET /api/v1/pow/health/ready says whether the fleet can prove."""
        return {"status": "ok"}

    app.include_router(models)
    return app
