"""Judges of several nodes side by side: what all of them wait for is computed in one pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch

if TYPE_CHECKING:
    from proofserve.engines.reference.engine import Run
    from proofserve.verifier.validator import Compute

T = TypeVar("T")
# The runs that each judge waits for, by its name, and what they give.
Asked = Mapping[str, Sequence["Run"]]
Answered = Mapping[str, Sequence[ProofBatch]]


def fill(future: Future[T], work: Callable[[], T]) -> Future[T]:
    """Have ``future`` hold what ``work`` returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is taken
        future.set_exception(error)
    return future


def side_by_side(
    judges: Mapping[str, Callable[["Compute"], T]], compute: Callable[[Asked], Answered]
) -> Iterator[tuple[str, Future[T]]]:
    """The end of each judge by its name, as they come.

    Each judge has a thread of its own, and is called with a function that computes its runs.
    ``compute`` is called in the caller's thread, once all judges that have not ended wait for
    their runs. Its EngineFault is raised in all of them; any other error of it, and a caller that
    takes no more, end the judges.
    """
    running = _RunningJudges(left=set(judges))
    with ThreadPoolExecutor(max(1, len(judges)), thread_name_prefix="judge") as threads:
        for name, judge in judges.items():
            ended = threads.submit(judge, partial(running.ask, name))
            ended.add_done_callback(partial(running.end, name))
        try:
            while running.left:
                if (one := running.until_one_ends()) is not None:
                    yield one
                else:
                    running.answer(compute)
        finally:
            while running.left:
                if running.until_one_ends() is None:
                    running.refuse(EngineFault("the validator ends"))


@dataclass(slots=True)
class _RunningJudges:
    """The judges that have not ended, and what those wait for that wait.

    In ``events`` the runs of a judge that has ended are None.
    """

    left: set[str]
    waiting: dict[str, tuple[Sequence["Run"], Future[Any]]] = field(default_factory=dict)
    events: SimpleQueue[tuple[str, Sequence["Run"] | None, Future[Any]]] = field(
        default_factory=SimpleQueue
    )

    def ask(self, name: str, runs: Sequence["Run"]) -> Sequence[ProofBatch]:
        """Called by a judge's thread: what the runs give."""
        answer: Future[Sequence[ProofBatch]] = Future()
        self.events.put((name, runs, answer))
        return answer.result()

    def end(self, name: str, ended: Future[Any]) -> None:
        """Called by a judge's thread."""
        self.events.put((name, None, ended))

    def until_one_ends(self) -> tuple[str, Future[Any]] | None:
        """The next judge that ends; None once all that are left wait."""
        while self.left - self.waiting.keys():
            name, runs, future = self.events.get()
            if runs is None:
                self.left.remove(name)
                return name, future
            self.waiting[name] = runs, future
        return None

    def answer(self, compute: Callable[[Asked], Answered]) -> None:
        try:
            made = compute({name: runs for name, (runs, _) in self.waiting.items()})
        except EngineFault as error:
            self.refuse(error)
            return
        for name, (_, answer) in self.waiting.items():
            answer.set_result(made[name])
        self.waiting.clear()

    def refuse(self, error: EngineFault) -> None:
        for _, answer in self.waiting.values():
            answer.set_exception(error)
        self.waiting.clear()
