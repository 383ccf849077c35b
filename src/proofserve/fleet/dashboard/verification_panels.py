"""What the page shows of verification: verdicts, the queue of jobs, the histogram of distances."""

from typing import Final, Literal

from proofserve.dashboard.records import DistanceHistogram, Fact, JobPanel, LastVerdict
from proofserve.fleet.verification_records import (
    JobPhase,
    MemberVerdict,
    VerdictOutcome,
    VerificationView,
)

_SHOWN: Final[dict[VerdictOutcome, Literal["honest", "fraud", "undecided", "no verdict"]]] = {
    VerdictOutcome.HONEST: "honest",
    VerdictOutcome.FRAUD: "fraud",
    VerdictOutcome.UNDECIDED: "undecided",
    VerdictOutcome.ABSTAINED: "no verdict",
}


def last_verdict(found: MemberVerdict) -> LastVerdict:
    return LastVerdict(
        verdict=_SHOWN[found.outcome],
        at=found.at,
        test=found.test or "",
        nonces=found.nonces or None,
        distance=found.distance,
        threshold=found.threshold,
    )


def job_panel(seen: VerificationView, now: float) -> JobPanel | None:
    """None for a fleet without any verification."""
    if not seen.outcomes and not any(seen.jobs.values()):
        return None
    running, queued = (seen.jobs.get(each, 0) for each in (JobPhase.RUNNING, JobPhase.QUEUED))
    oldest = seen.oldest_asked_at
    outcomes = (
        Fact(label=f"Verdicts: {_SHOWN[each]}", value=seen.outcomes.get(each, 0))
        for each in VerdictOutcome
    )
    return JobPanel(
        unit="verifications",
        queued=running + queued,
        oldest_s=None if oldest is None else max(0.0, now - oldest),
        states=(
            Fact(label="Running", value=running),
            Fact(label="Waiting for a worker", value=queued),
            Fact(label="Failed in the last day", value=seen.jobs.get(JobPhase.FAILED, 0)),
            *outcomes,
        ),
    )


def distance_histogram(seen: VerificationView) -> DistanceHistogram | None:
    found = seen.distances
    if found is None:
        return None
    return DistanceHistogram(
        edges=found.edges,
        counts=found.counts,
        threshold=found.threshold,
        about=f"nonces of the newest {found.verdicts} verdicts",
    )
