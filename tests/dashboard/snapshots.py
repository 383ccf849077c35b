"""A made-up fleet, for what only a fleet shows: many members, verdicts, distances."""

import random
import time

from proofserve.dashboard.records import (
    ActionField,
    ActionOffer,
    DashboardSnapshot,
    DistanceHistogram,
    Fact,
    JobPanel,
    KeyFigure,
    LastVerdict,
    Level,
    MemberRow,
    RoundPanel,
    TimelineEvent,
    Trend,
)

COLUMNS = ("stalled_s", "rate", "chat_wait_s", "held_back_by", "outbox_age_s", "verdict")
THRESHOLD = 0.026


def trend(draw: random.Random, usual: float, count: int = 60) -> Trend:
    values = tuple(round(usual * draw.uniform(0.9, 1.08), 1) for _ in range(count))
    return Trend(step_s=5.0, values=values, baseline=usual)


def member(number: int, draw: random.Random) -> MemberRow:
    """Of a hundred members one is lost, one convicted and two have slow callbacks."""
    state, level, reason, stalled = "ready", Level.GOOD, "", 0.0
    verdict, distance, outbox_age = "honest", draw.uniform(0.006, 0.012), draw.uniform(0, 4)
    if number % 100 == 7:
        state, level, stalled = "lost", Level.BAD, draw.uniform(70, 900)
        reason = "no answer for a minute: connection refused"
    if number % 100 == 31:
        state, level, verdict, distance = "cordoned", Level.BAD, "fraud", 0.041
        reason = "convicted by the test direction: weights in 4 bits"
    if number % 50 == 12:
        state, level, outbox_age = "ready", Level.WARNING, draw.uniform(90, 400)
        reason = "callbacks are late"
    cordon = ActionOffer(
        id="cordon",
        label="Cordon",
        path=f"/api/v1/fleet/members/{number}/cordon",
        confirmation="The member gets no new work.",
        fields=(ActionField(name="reason", label="Reason", required=True),),
        dangerous=True,
    )
    return MemberRow(
        id=f"m{number}",
        name=f"rack{number // 40 + 1}-node-{number:04}",
        state=state,
        level=level,
        reason=reason,
        version="0.33.0",
        model="Qwen/Qwen3-32B",
        stalled_s=stalled,
        rate=trend(draw, draw.uniform(600, 900)),
        chat_wait_s=draw.uniform(0.01, 0.2),
        held_back_by="chat" if number % 9 == 0 else "",
        outbox_age_s=outbox_age,
        verdict=LastVerdict(
            verdict=verdict,  # type: ignore[arg-type] # one of the two above
            at=time.time() - draw.uniform(60, 4000),
            test="direction",
            nonces=40,
            distance=distance,
            threshold=THRESHOLD,
        ),
        facts=(
            Fact(label="Lane", value=number),
            Fact(label="URL", value=f"http://10.0.0.{number}"),
        ),
        actions=(cordon,),
    )


def fleet(count: int) -> DashboardSnapshot:
    draw = random.Random(count)
    now = time.time()
    edges = tuple(round(0.002 * index, 3) for index in range(25))
    counts = tuple(int(900 * 0.5 ** (abs(index - 4) / 1.6)) for index in range(24))
    return DashboardSnapshot(
        kind="fleet",
        title="Fleet",
        at=now,
        version="proofserve 0.1.0",
        figures=(
            KeyFigure(label="Nonces", value=731_204.0, unit="/s", trend=trend(draw, 731_000)),
            KeyFigure(label="Members ready", value=count - 20, of=count),
            KeyFigure(label="Jobs waiting", value=38),
        ),
        columns=COLUMNS,
        members=tuple(member(number, draw) for number in range(count)),
        round=RoundPanel(
            id="a1b2",
            state="generating",
            started_at=now - 900,
            facts=(Fact(label="Block", value="0xabc"), Fact(label="Lanes", value="1000 of 1024")),
            events=(
                TimelineEvent(at=now - 900, text="started by the network"),
                TimelineEvent(at=now - 300, text="rack1-node-0007 lost", level=Level.WARNING),
            ),
            rate=trend(draw, 731_000, 180),
            rate_until=now,
        ),
        distances=DistanceHistogram(
            edges=edges, counts=counts, threshold=THRESHOLD, about="Of the last 400 jobs."
        ),
        jobs=JobPanel(
            unit="jobs",
            queued=38,
            limit=500,
            oldest_s=12.0,
            states=(Fact(label="Running", value=8), Fact(label="Done", value=1204)),
        ),
    )
