"""Sends all hostile requests to the routes of a server."""

import math
from collections.abc import Iterator, Sequence

from fuzz.doors import Door
from fuzz.framing import Framed, framed, too_heavy
from fuzz.hostile import corpus
from fuzz.refusals import refused, told, whole

# Different bodies for a server, at the least.
BODIES = 200


def storm(port: int, doors: Sequence[Door], within_s: float = math.inf) -> None:
    """Every hostile request at each door is refused ``within_s``; the slowest are printed."""
    bodies: set[int] = set()
    found = [refused(port, each, within_s) for each in _requests(doors, bodies)]
    print(f"{len(bodies)} bodies at {len(doors)} doors: {told(found)}", flush=True)
    assert len(bodies) >= BODIES
    late = [each for each in found if each.seconds >= within_s]
    assert not late, told(late)


def _requests(doors: Sequence[Door], bodies: set[int]) -> Iterator[Framed]:
    """One after the other: together they are gigabytes. Of the bodies hashes are left."""
    for path, form in doors:
        for hostile in corpus(form):
            bodies.add(hash(hostile.body))
            yield whole(path, hostile)
        yield from framed(path)
        yield from too_heavy(path)
