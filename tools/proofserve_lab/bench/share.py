"""The share of engine time that proofs take beside endless chat, and what chat loses by it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from time import sleep

from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Figure, Progress, Report
from proofserve_lab.bench.chat import Load, Window, at_most, in_turns
from proofserve_lab.bench.statistics import median, quantile
from proofserve_lab.chats import Stream, stream_answer, tokens_between

# Before a window: at least, so that the round runs or its last forward has ended; and up to so much
# more, because windows that all began at one instant of a forward would count too many or too few.
SETTLE_S, SPREAD_S = 0.5, 1.0
# A window in which neither chat nor proofs had the engine for more of the time shows no endless
# chat: proofs may use all of a pause. It is left out with the other window of its pair.
IDLE = 0.1
TOLERATED = 0.25
TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class MeasuredShare:
    """All windows of the server with the share ``promised``, in pairs: without, with a round."""

    promised: float
    pairs: Sequence[tuple[Window, Window]]
    streams: Sequence[Stream]

    @property
    def counted(self) -> list[tuple[Window, Window]]:
        return [pair for pair in self.pairs if pair[1].idle <= IDLE]

    @property
    def share(self) -> float | None:
        """Of all time of the windows with a round; None without windows."""
        rounds = [window for _, window in self.counted]
        seconds = sum(window.seconds for window in rounds)
        return sum(window.proof_s for window in rounds) / seconds if seconds else None

    @property
    def loss(self) -> float | None:
        """1 less the median, over the pairs, of tokens a second with a round over without.

        None if no pair counts, or if chat had no tokens in a window without a round.
        """
        speeds = [(self.speed(plain), self.speed(beside)) for plain, beside in self.counted]
        if not speeds or not all(plain for plain, _ in speeds):
            return None
        found = median([beside / plain for plain, beside in speeds])
        return None if found is None else 1 - found

    def speed(self, window: Window) -> float:
        return tokens_between(self.streams, window.began, window.ended) / window.seconds

    def gaps(self, windows: Sequence[Window]) -> list[float]:
        """Seconds between the tokens of a stream, within ``windows``, of all streams."""
        spans = [(window.began, window.ended) for window in windows]
        return [gap for span in spans for stream in self.streams for gap in stream.gaps(*span)]


def measure_share(
    node: NodeClient, promised: float, work: Work, load: Load, progress: Progress
) -> MeasuredShare:
    """One steady load. The server at ``node`` must run with ``--poc-share`` set to ``promised``."""
    progress.step(f"endless chat at a share of {promised:g}, in windows", 2 * load.pairs)
    draw = random.Random(0)  # noqa: S311 - times, not secrets

    def settle() -> None:
        sleep(SETTLE_S + draw.uniform(0, SPREAD_S))

    with load.clients_of(node, work.model, stream_answer) as loop:
        loop.settle(SETTLE_S)
        windows = in_turns(node, work, load, progress, settle)
    plain = [window for window in windows if not window.beside_round]
    beside = [window for window in windows if window.beside_round]
    return MeasuredShare(promised, list(zip(plain, beside, strict=True)), loop.replies)


def share_report(
    work: Work, load: Load, measured: Sequence[MeasuredShare], where: Mapping[str, str | int]
) -> Report:
    figures = [figure for each in measured for figure in _figures(each)]
    setup = {"work": asdict(work), "load": asdict(load)}
    windows = {
        f"{found.promised:g}": {
            "plain_tokens_per_second": [found.speed(window) for window, _ in found.pairs],
            "round_tokens_per_second": [found.speed(window) for _, window in found.pairs],
            "proof_s": [window.proof_s for _, window in found.pairs],
            "window_s": [window.seconds for _, window in found.pairs],
            "idle": [window.idle for _, window in found.pairs],
            "forwards": [w.after.forwards - w.before.forwards for _, w in found.pairs],
            "errors": [stream.error for stream in found.streams if stream.error][:20],
        }
        for found in measured
    }
    return Report("chat-priority, shares", tuple(figures), setup, windows, where)


def _figures(found: MeasuredShare) -> list[Figure]:
    """The figures of one share. Each name ends with the share, because a report has several."""
    end, promised, share, loss = f"_{found.promised:g}", found.promised, found.share, found.loss
    plain = [window for window, _ in found.counted]
    beside = [window for _, window in found.counted]
    errors = [stream.error for stream in found.streams if stream.error]
    left_out = len(found.pairs) - len(found.counted)
    error = None if share is None else abs(share - promised)
    idle = mean(window.idle for window in beside) if beside else None
    speed = median([found.speed(window) for window in plain])
    return [
        Figure(
            "proof_share" + end, share, f"share of engine time of proofs; {promised:g} promised"
        ),
        Figure("share_error" + end, error, "its distance from the promise", at_most(TOLERANCE)),
        Figure("tokens_per_second" + end, speed, "endless chat, no proofs, median"),
        Figure(
            "chat_loss" + end,
            loss,
            "tokens a second that chat loses by a round, of 1, median of all pairs",
            at_most(promised + TOLERANCE),
        ),
        *_gap_figures(found, "plain", plain),
        *_gap_figures(found, "round", beside),
        Figure("idle" + end, idle, "share of engine time beside a round that stayed unused"),
        Figure(
            "left_out" + end,
            left_out,
            f"pairs of {len(found.pairs)} left out: {IDLE:.0%} or more of the time unused",
            at_most(TOLERATED * len(found.pairs)),
        ),
        Figure("errors" + end, len(errors), "chats refused, cut off or aborted", at_most(0)),
    ]


def _gap_figures(
    found: MeasuredShare, kind: str, windows: Sequence[Window]
) -> tuple[Figure, Figure]:
    end = f"_{kind}_{found.promised:g}"
    beside = "no proofs" if kind == "plain" else "a round running"
    ms = [1e3 * gap for gap in found.gaps(windows)]
    between = f"between two tokens of a chat, {beside}, median"
    return (
        Figure("gap_ms_p50" + end, quantile(ms, 0.5), between),
        Figure("gap_ms_p99" + end, quantile(ms, 0.99), "the same, 99 of 100"),
    )
