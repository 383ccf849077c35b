"""Which of several controllers reconciles: one lock in the database, or beside its file."""


class Leadership:
    """Tries for the lock while ``run`` runs. Made by ``Leadership(url)``, as ``FleetStore.open``.

    PostgreSQL: an advisory lock on a connection of its own. SQLite: a lock on ``<file>.leader``.
    """

    def __init__(self, url: str, interval_s: float = 1.0) -> None: ...

    @property
    def held(self) -> bool:
        """Whether this process leads, as far as it knows: a lost lock is noticed within 4 s."""
        ...

    async def run(self) -> None:
        """Hold the lock, or try for it each ``interval_s``, until cancelled; then give it back."""
        ...
