"""The page of a node, behind the node's keys."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request

from proofserve.api.dashboard.node_history import NodeHistory
from proofserve.api.dashboard.node_snapshot import snapshot_of
from proofserve.api.errors import NotEnabled
from proofserve.api.failures import guarded
from proofserve.api.node import NODE, Node
from proofserve.dashboard import routes
from proofserve.dashboard.routes import SnapshotFeed
from proofserve.rounds.errors import ShuttingDown


def router(get_node: Callable[[Request], Node]) -> APIRouter:
    """The routes of the page; its data need a viewer's or an operator's key."""
    return routes.router(_feed, guarded(get_node))


def with_dashboard(node: Node, history: NodeHistory) -> Node:
    """``node`` with a feed that reads it; ``history`` is fed by another task."""

    def is_ending() -> bool:
        try:
            node.manager.require_open()
        except ShuttingDown:
            return True
        return False

    return replace(node, dashboard=SnapshotFeed(partial(snapshot_of, node, history), is_ending))


def _feed(request: Request) -> SnapshotFeed:
    node: Node = request.scope[NODE]
    if node.dashboard is None:
        raise NotEnabled("the dashboard is off; start the server with --poc-dashboard")
    return node.dashboard
