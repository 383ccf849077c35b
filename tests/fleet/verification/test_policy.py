from dataclasses import replace
from pathlib import Path

import pytest

from fleet.records import (
    DISTANCE,
    GENERATING,
    OTHER_DIGEST,
    ROUND,
    condition_of,
    lane,
    member,
    seen,
)
from proofserve.fleet.records import DesiredState, FleetView
from proofserve.fleet.verification import VerificationPolicy, due, is_due, job_of
from proofserve.fleet.verification_records import AfterConviction, JobCause, VerificationRule
from proofserve.fleet.watch import Overview
from proofserve.rounds.state import State
from proofserve.wiring.fleet import policy_of

GOOD = "[default]\nevery_sec = 5\nnonces = 4\ndist_threshold = 0.03\n"


A, B, C = (VerificationRule(nonces=number) for number in (1, 2, 3))
RULE = VerificationRule(nonces=10, every_s=60.0)


def written(folder: Path, text: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    return file


def test_a_member_has_its_own_fields_and_the_others_of_the_default(tmp_path: Path) -> None:
    own = 'every_nonces = 50\nconviction = "cordon"\nalpha_per_day = 1e-4\nunproved_share = 0\n'
    text = f'{GOOD}[[member]]\nname = "m1"\n{own}'
    policy = policy_of(written(tmp_path, text))
    assert policy is not None
    rule = policy.members["m1"]
    assert (rule.every_s, rule.every_nonces, rule.nonces) == (None, 50, 4)
    assert rule.conviction is AfterConviction.CORDON
    assert rule.dist_threshold == 0.03
    assert (rule.alpha_per_day, rule.unproved_share) == (1e-4, 0)
    assert policy.default is not None
    assert (policy.default.alpha_per_day, policy.default.unproved_share) == (1e-6, 0.25)


MEMBERS = '[default]\nby = "members"\nevery_sec = 5\nnonces = 24\n'


def test_members_judge_each_other_only_after_a_round(tmp_path: Path) -> None:
    policy = policy_of(written(tmp_path, MEMBERS))
    assert policy is not None
    rule = policy.default
    assert rule is not None
    progress = lane(0, stored=100, last_stored_at=900.0)
    assert not is_due(progress, rule, 1000.0)
    assert is_due(progress, rule, 1000.0, round_ended_at=900.0)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (MEMBERS.replace("24", "23"), 'nonces: by = "members" needs 24 at least'),
        (f"{MEMBERS}dist_threshold = 0.03\n", "dist_threshold: it is about weights"),
        (f'{MEMBERS}tests = ["footprint"]\n', "tests: it is about weights"),
        ("", "it has no rule"),
        (GOOD.replace("nonces = 4", "nonces = 0"), "default.nonces"),
        (GOOD.replace("nonces = 4\n", ""), r"\[default\]: nonces: is needed"),
        (GOOD.replace("every_sec = 5\n", ""), r"\[default\]: every_sec: is needed"),
        (
            GOOD.replace("dist_threshold = 0.03\n", 'tests = ["count"]\n'),
            r"\[default\]: dist_threshold: no threshold",
        ),
        (f'{GOOD}tests = ["guess"]', "tests: 'guess' is none of count"),
        (f'{GOOD}tests = ["paired"]', "calibration: the test paired needs"),
        (f'{GOOD}conviction = "callback"', "callback_url: is needed"),
        (f"{GOOD}nonsense = 1", "default.nonsense"),
        (f"{GOOD}alpha = 1e-6", "default: alpha: give alpha_per_day instead"),
        (f"{GOOD}alpha_per_day = 0", "default.alpha_per_day"),
        (f"{GOOD}alpha_per_day = 1", "default.alpha_per_day"),
        (f"{GOOD}unproved_share = 1.5", "default.unproved_share"),
        (f"{GOOD}unproved_share = nan", "default.unproved_share"),
        (f"{GOOD}[[member]]\nnonces = 3", "member.0: give name or url"),
        (f'{GOOD}[[model]]\nname = "q"\ncalibration = "no.json"', r"\[\[model\]\] q: calibration"),
    ],
)
def test_a_bad_policy_names_the_table_and_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy_of(written(tmp_path, text))


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (VerificationPolicy(A, {"m": B}, {"toy": C}), B),
        (VerificationPolicy(A, {"http://m:8000": B}, {"toy": C}), B),
        (VerificationPolicy(A, {"other": B}, {"toy": C}), C),
        (VerificationPolicy(A, {"other": B}, {"other": C}), A),
        (VerificationPolicy(None, {"other": B}, {"other": C}), None),
    ],
)
def test_a_member_has_the_rule_of_its_name_else_of_its_model_else_the_default(
    policy: VerificationPolicy, rule: VerificationRule | None
) -> None:
    assert policy.rule_of(condition_of(member(seen()))) is rule


def test_a_member_that_never_answered_has_no_model() -> None:
    assert VerificationPolicy(A, {}, {"toy": C}).rule_of(condition_of(member())) is A


@pytest.mark.parametrize(
    ("stored", "sampled_at", "rule", "expected"),
    [
        (9, None, RULE, False),
        (10, None, RULE, True),
        (10, 941.0, RULE, False),
        (10, 940.0, RULE, True),
        (49, None, replace(RULE, every_nonces=50), False),
        (50, 940.0, replace(RULE, every_nonces=50), True),
        (50, 999.0, replace(RULE, every_nonces=50), False),
        (50, 999.0, replace(RULE, every_nonces=50, every_s=None), True),
    ],
)
def test_a_sample_is_due_when_enough_is_new_and_the_time_has_come(
    stored: int, sampled_at: float | None, rule: VerificationRule, expected: bool
) -> None:
    progress = lane(stored=7 + stored, sampled_at=sampled_at, sampled_stored=7)
    assert is_due(progress, rule, 1000.0) is expected


def overview_of(desired: DesiredState) -> Overview:
    """The lanes 0 of the member m and 1 of a member that was removed, both with enough."""
    lanes = (lane(0, stored=99), lane(1, member_id="removed", stored=99))
    view = FleetView(1000.0, (), desired, lanes)
    return Overview(view, (condition_of(member(seen())),), lanes, None)


@pytest.mark.parametrize(
    ("desired", "busy", "expected"),
    [
        (GENERATING, set(), [0]),
        (DesiredState(State.STOPPED, ROUND), set(), [0]),
        (GENERATING, {(ROUND.number, 0)}, []),
        (GENERATING, {(ROUND.number + 1, 0)}, [0]),
        (DesiredState(State.GENERATING, DISTANCE), set(), []),
        (DesiredState(), set(), []),
    ],
)
def test_samples_are_due_of_known_members_lanes_without_an_open_job(
    desired: DesiredState, busy: set[tuple[int, int]], expected: list[int]
) -> None:
    found = list(due(overview_of(desired), VerificationPolicy(RULE), (), busy))
    assert [progress.lane for _, progress, _ in found] == expected


@pytest.mark.parametrize(
    ("stored", "ended_at", "last_stored_at", "expected"),
    [
        (10, 989.0, None, True),
        (10, 989.0, 989.5, True),
        # Members may still deliver.
        (10, 991.0, 980.0, False),
        (10, 900.0, 991.0, False),
        (9, 900.0, 900.0, False),
    ],
)
def test_what_is_new_at_the_end_of_a_round_is_sampled_whatever_the_times_of_the_rule(
    stored: int, ended_at: float, last_stored_at: float | None, expected: bool
) -> None:
    rule = replace(RULE, every_nonces=50)
    known = {"last_stored_at": last_stored_at, "sampled_at": 999.0, "sampled_stored": 7}
    progress = lane(stored=7 + stored, **known)
    assert is_due(progress, rule, 1000.0, ended_at) is expected


def test_lanes_of_rounds_that_were_replaced_are_sampled() -> None:
    before = replace(ROUND, number=1, ended_at=980.0)
    ended = [(before, lane(3, "before", stored=99, sampled_at=979.0))]
    overview = overview_of(GENERATING)
    found = list(due(overview, VerificationPolicy(RULE), ended, {(2, 0)}))
    assert [(of.number, progress.lane) for of, progress, _ in found] == [(1, 3)]
    assert list(due(overview, VerificationPolicy(RULE), ended, {(2, 0), (1, 3)})) == []


@pytest.mark.parametrize(
    ("digest", "queue"),
    [
        # The fleet may serve other weights by now.
        (OTHER_DIGEST, f"weights:{OTHER_DIGEST}"),
        (None, "model:old"),
    ],
)
def test_a_lane_is_judged_by_the_weights_that_the_fleet_served_when_it_was_given(
    digest: str | None, queue: str
) -> None:
    given = lane(weights_digest=digest, model="old", stored=99)
    job = job_of(ROUND, given, RULE, JobCause.POLICY, 5, 1000.0)
    assert job.queue == queue
    assert (job.weights_digest, job.model) == (digest, "old")
