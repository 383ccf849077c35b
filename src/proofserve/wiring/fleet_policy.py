"""The policy of a file as rules that workers can carry out."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proofserve.fleet.verification import VerificationPolicy
from proofserve.fleet.verification_records import AfterConviction, VerificationRule
from proofserve.lab.report import LabError
from proofserve.protocol.errors import ProtocolError
from proofserve.settings.fleet import read_policy
from proofserve.verifier.judging import OF_A_CALIBRATION, TESTS, threshold_of

# What the file calls otherwise, because it says the unit.
_RENAMED = {"every_sec": "every_s", "timeout_sec": "timeout_s"}
# These fields belong together: a table that names one of them takes none from [default].
_TOGETHER = (("every_sec", "every_nonces"), ("calibration", "dist_threshold", "p_mismatch"))


def policy_of(file: Path | None) -> VerificationPolicy | None:
    """The policy in ``file``, with the calibrations that it names; None for None.

    Raises ValueError naming the file, the table and the field.
    """
    if file is None:
        return None
    read = read_policy(file)
    made = _Rules(file, read.default.given() if read.default else {})
    default = made.rule("[default]", {}) if read.default else None
    members, models = {}, {}
    for member in read.member:
        members[member.key] = made.rule(f"[[member]] {member.key}", member.given())
    for model in read.model:
        models[model.name] = made.rule(f"[[model]] {model.name}", model.given())
    if default is None and not members and not models:
        raise ValueError(f"{file}: it has no rule: give [default], [[member]] or [[model]]")
    return VerificationPolicy(default, members, models, made.calibrations)


class _Rules:
    def __init__(self, file: Path, default: Mapping[str, Any]) -> None:
        self._file = file
        self._default = default
        self.calibrations: dict[str, str] = {}

    def rule(self, table: str, own: Mapping[str, Any]) -> VerificationRule:
        inherited = dict(self._default)
        for group in _TOGETHER:
            if not own.keys().isdisjoint(group):
                inherited = {n: value for n, value in inherited.items() if n not in group}
        fields = {**inherited, **own}
        if problem := self._problem(fields):
            raise ValueError(f"{self._file}: {table}: {problem}")
        if (path := fields.pop("calibration", None)) is not None:
            content = self._path(path).read_text("utf-8")
            digest = hashlib.sha256(content.encode()).hexdigest()
            self.calibrations[digest] = content
            fields["calibration"] = digest
        return VerificationRule(**{_RENAMED.get(n, n): value for n, value in fields.items()})

    def _problem(self, fields: Mapping[str, Any]) -> str | None:
        tests = fields.get("tests", ())
        if "nonces" not in fields:
            return "nonces: is needed: the size of a sample"
        if fields.keys().isdisjoint(_TOGETHER[0]):
            return "every_sec: is needed, or every_nonces: how often a sample is taken"
        if unknown := next((test for test in tests if test not in TESTS), None):
            return f"tests: {unknown!r} is none of {', '.join(TESTS)}"
        callback = fields.get("conviction") is AfterConviction.CALLBACK
        if callback is not ("callback_url" in fields):
            return 'callback_url: is needed with conviction = "callback", and only there'
        return self._problem_of_threshold(fields)

    def _problem_of_threshold(self, fields: Mapping[str, Any]) -> str | None:
        tests, path = fields.get("tests", ()), fields.get("calibration")
        needing = sorted(OF_A_CALIBRATION.intersection(tests))
        if needing and path is None:
            return f"calibration: the test {needing[0]} needs the file of `calibrate noise`"
        given = fields.get("dist_threshold"), path and self._path(path), fields.get("p_mismatch")
        try:
            threshold_of(tests, *given)
        except (LabError, ProtocolError) as error:
            named = "dist_threshold" if path is None else "calibration"
            return f"{named}: {error}"
        return None

    def _path(self, path: Path) -> Path:
        """Paths in the file are from its own folder."""
        return self._file.parent / path
