from pathlib import Path

import pytest

from proofserve.fleet.verification.records import AfterConviction
from proofserve.wiring.verification.policy import policy_of

GOOD = "[default]\nevery_sec = 5\nnonces = 4\ndist_threshold = 0.03\n"


def written(folder: Path, text: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(text)
    return file


def test_a_member_has_its_own_fields_and_the_others_of_the_default(tmp_path: Path) -> None:
    text = f'{GOOD}[[member]]\nname = "m1"\nevery_nonces = 50\nconviction = "cordon"\n'
    policy = policy_of(written(tmp_path, text))
    assert policy is not None
    rule = policy.members["m1"]
    assert (rule.every_s, rule.every_nonces, rule.nonces) == (None, 50, 4)
    assert rule.conviction is AfterConviction.CORDON
    assert rule.dist_threshold == 0.03


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "it has no rule"),
        (GOOD.replace("nonces = 4", "nonces = 0"), "default.nonces"),
        (GOOD.replace("nonces = 4\n", ""), r"\[default\]: nonces: is needed"),
        (GOOD.replace("every_sec = 5\n", ""), r"\[default\]: every_sec: is needed"),
        (GOOD.replace("dist_threshold = 0.03\n", ""), r"\[default\]: dist_threshold: no threshold"),
        (f'{GOOD}tests = ["guess"]', "tests: 'guess' is none of count"),
        (f'{GOOD}tests = ["paired"]', "calibration: the test paired needs"),
        (f'{GOOD}conviction = "callback"', "callback_url: is needed"),
        (f"{GOOD}nonsense = 1", "default.nonsense"),
        (f"{GOOD}[[member]]\nnonces = 3", "member.0: give name or url"),
        (f'{GOOD}[[model]]\nname = "q"\ncalibration = "no.json"', r"\[\[model\]\] q: calibration"),
    ],
)
def test_a_bad_policy_names_the_table_and_the_field(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy_of(written(tmp_path, text))
