"""The state of each backend, and the choice of one for a request."""

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from proofserve.gateway.backends.upstream import Pool
from proofserve.gateway.records import BackendSpec

# Faults in a row after which a backend rests; its first and its longest rest, in seconds.
FAULTS = 3
REST_S = 2.0
LONGEST_REST_S = 60.0
# With prefix affinity, a backend may have this multiple of its even share of the requests.
IMBALANCE = 1.25

Clock = Callable[[], float]


class Backend:
    """One backend and its state. ``models`` is None until the backend has listed them."""

    def __init__(self, spec: BackendSpec, pool: Pool, clock: Clock) -> None:
        self.spec = spec
        self.name = spec.url
        self.pool = pool
        self.outstanding = 0
        self.healthy = True
        self.draining = False
        self.models: dict[str, dict[str, Any]] | None = None
        self.ejections = 0
        self.fault_count = 0
        self._clock = clock
        self._faults = 0
        self._rest_until = 0.0
        self._trial = False

    @property
    def load(self) -> float:
        return self.outstanding / self.spec.weight

    @property
    def resting(self) -> bool:
        """Whether it rests after faults, or one request tries it after a rest."""
        if self._faults < FAULTS:
            return False
        return self._trial or self._clock() < self._rest_until

    @property
    def up(self) -> bool:
        return self.healthy and not self.resting and not self.draining

    def serves(self, model: str | None) -> bool:
        """Whether it has the model. Until it has listed its models, it may have any."""
        return self.models is None or model is None or model in self.models

    def label(self, model: str | None) -> str:
        """``model`` as a label of metrics; "unknown" if the backend does not list it."""
        return model if model is not None and self.models and model in self.models else "unknown"

    def chosen(self) -> None:
        """Count a request to this backend. The first one after a rest is a trial."""
        self.outstanding += 1
        if self._faults >= FAULTS and self._clock() >= self._rest_until:
            self._trial = True

    def released(self) -> None:
        self.outstanding -= 1
        self._trial = False

    def worked(self) -> None:
        """Count an answer below 500: a 4xx is the client's fault."""
        self._faults = 0
        self._trial = False

    def failed(self) -> None:
        """Count a fault: a broken connection or a 5xx. After ``FAULTS`` in a row it rests."""
        self.fault_count += 1
        if self.resting and not self._trial:
            # The request was sent before the rest began: a crash under load counts as one fault.
            return
        self._faults += 1
        self._trial = False
        if self._faults >= FAULTS:
            self.ejections += 1
            rest = REST_S * 2 ** min(self._faults - FAULTS, 5)
            self._rest_until = self._clock() + min(rest, LONGEST_REST_S)


class Fleet:
    def __init__(self, backends: Sequence[Backend], affinity: bool) -> None:
        self.backends = list(backends)
        self._affinity = affinity
        self._rotation = 0

    def named(self, name: str) -> Backend | None:
        return next((backend for backend in self.backends if backend.name == name), None)

    def knows(self, model: str | None) -> bool:
        """Whether a backend has the model; true while there is none, which may change soon."""
        for backend in self.backends:
            if backend.serves(model):
                return True
        return not self.backends

    def choose(
        self, model: str | None, prefix: bytes, tried: Collection[Backend]
    ) -> Backend | None:
        """The best backend that was not ``tried``; None if there is none.

        If all of them rest or are unhealthy, one of these is chosen: it may work again.
        """
        if len(self.backends) == 1:
            (only,) = self.backends
            return None if only in tried or only.draining or not only.serves(model) else only
        able = [b for b in self.backends if not b.draining and b not in tried and b.serves(model)]
        fit = [b for b in able if b.healthy and not b.resting] or able
        if not fit:
            return None
        if self._affinity and prefix:
            return self._by_prefix(fit, prefix)
        return self._least_loaded(fit)

    def _least_loaded(self, fit: Sequence[Backend]) -> Backend:
        # Backends with equal load take turns.
        self._rotation += 1
        start = self._rotation % len(fit)
        return min([*fit[start:], *fit[:start]], key=lambda backend: backend.load)

    def _by_prefix(self, fit: Sequence[Backend], prefix: bytes) -> Backend:
        """Rendezvous hashing with a bound on the load; no earlier choice needs to be stored."""
        weight = sum(backend.spec.weight for backend in fit)
        bound = IMBALANCE * (sum(backend.outstanding for backend in fit) + 1) / weight
        # Rounded up, so that the bounds add up to more than all requests and a backend has room.
        with_room = [b for b in fit if b.outstanding < math.ceil(bound * b.spec.weight)]
        return max(
            with_room,
            key=lambda b: hashlib.blake2b(prefix + b.name.encode(), digest_size=8).digest(),
        )
