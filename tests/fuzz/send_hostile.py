"""Sends all hostile requests to the routes of a server."""

import math
from collections.abc import Iterator, Sequence

from fuzz.framing import Framed, framed, too_large
from fuzz.hostile import corpus
from fuzz.refusals import refused, slowest, whole
from fuzz.routes import Route

# The least number of different bodies for a server.
BODIES = 200


def send_hostile(port: int, routes: Sequence[Route], within_s: float = math.inf) -> None:
    """Assert that each route refuses every hostile request ``within_s``; print the slowest."""
    bodies: set[int] = set()
    found = [refused(port, each, within_s) for each in _requests(routes, bodies)]
    print(f"{len(bodies)} bodies at {len(routes)} routes: {slowest(found)}", flush=True)
    assert len(bodies) >= BODIES
    late = [each for each in found if each.seconds >= within_s]
    assert not late, slowest(late)


def _requests(routes: Sequence[Route], bodies: set[int]) -> Iterator[Framed]:
    """Yield one request at a time: together they are gigabytes. ``bodies`` keeps the hashes."""
    for path, form in routes:
        for hostile in corpus(form):
            bodies.add(hash(hostile.body))
            yield whole(path, hostile)
        yield from framed(path)
        yield from too_large(path)
