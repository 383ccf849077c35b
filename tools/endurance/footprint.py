"""The memory, descriptors, threads and gauges of a deployment's processes while they are idle."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from endurance.servers import Killable

# When the deployment is idle, each gauge must be back at its first value.
IDLE_GAUGES = (
    "proofserve_tasks",
    "proofserve_leased_blocks",
    "proofserve_queued_nonces",
    "proofserve_outbox_pending",
    "gateway_tasks",
    "gateway_in_flight",
    "gateway_queued",
)
FREE_BLOCKS = "proofserve_free_blocks"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Footprint:
    """By process: resident MiB, file descriptors and threads. ``held`` are gauges by their name."""

    resident: Mapping[str, float]
    descriptors: Mapping[str, int]
    threads: Mapping[str, int]
    held: Mapping[str, float]

    def growth(self, before: "Footprint") -> float:
        """The largest growth of a process's resident memory, as a share of its first value."""
        grown = (now / before.resident[name] - 1 for name, now in self.resident.items())
        return max(grown)

    def leaks(self, before: "Footprint") -> dict[str, float]:
        """Each descriptor count, thread count and gauge that is above its first value."""
        pairs = {
            **{f"{k} descriptors": (v, before.descriptors[k]) for k, v in self.descriptors.items()},
            **{f"{k} threads": (v, before.threads[k]) for k, v in self.threads.items()},
            **{name: (value, before.held[name]) for name, value in self.held.items()},
        }
        return {name: now - then for name, (now, then) in pairs.items() if now > then}


def footprint(servers: Iterable[Killable], pages: Iterable[str]) -> Footprint:
    """The footprint of all processes of ``servers`` and of their metrics ``pages`` (URLs)."""
    family = {name: p for server in servers for name, p in server.processes().items()}
    gauges = {name: value for page in pages for name, value in _read(page).items()}
    return Footprint(
        resident={name: _resident(process) for name, process in family.items()},
        descriptors={name: process.num_fds() for name, process in family.items()},
        threads={name: process.num_threads() for name, process in family.items()},
        # A block that is not free is leased, so fewer free blocks are a leak.
        held={**{name: gauges[name] for name in IDLE_GAUGES}, "KV blocks": -gauges[FREE_BLOCKS]},
    )


def counted(page: str, name: str) -> float:
    """The sum of all series of a metric."""
    return _read(page)[name]


def _resident(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / MIB


def _read(page: str) -> dict[str, float]:
    found: dict[str, float] = {}
    text = httpx.get(page, timeout=30.0).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found
