"""The TOML file of ``--policy``: how members of a fleet are verified."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from proofserve.fleet.members.sources import plain_url
from proofserve.fleet.verification_records import AfterConviction
from proofserve.settings.toml_file import TomlTable, read_toml


class RuleTable(TomlTable):
    """A rule. A field that ``[[member]]`` or ``[[model]]`` leaves out is that of ``[default]``."""

    every_sec: float | None = Field(None, gt=0, allow_inf_nan=False)
    every_nonces: int | None = Field(None, ge=1)
    nonces: int | None = Field(None, ge=1, le=100_000)
    tests: tuple[str, ...] | None = None
    alpha_per_day: float | None = Field(None, gt=0, lt=1)
    beta: float | None = Field(None, gt=0, lt=1)
    share: float | None = Field(None, gt=0, le=1)
    calibration: Path | None = None
    dist_threshold: float | None = Field(None, gt=0, le=2)
    p_mismatch: float | None = Field(None, gt=0, lt=1)
    conviction: AfterConviction | None = None
    callback_url: str | None = Field(None, min_length=1)
    attempts: int | None = Field(None, ge=1, le=100)
    timeout_sec: float | None = Field(None, gt=0, allow_inf_nan=False)
    priority: int | None = Field(None, ge=1, le=1000)

    @model_validator(mode="before")
    @classmethod
    def _has_no_alpha_of_a_verdict(cls, given: Any) -> Any:
        if isinstance(given, dict) and "alpha" in given:
            raise PydanticCustomError(
                "renamed",
                "alpha: give alpha_per_day instead, the chance that a day's verdicts together"
                " convict an honest member: each verdict gets a share of it",
            )
        return given

    def given(self) -> dict[str, Any]:
        """The fields of a rule that the file names, a threshold and a calibration as one."""
        found = {name: getattr(self, name) for name in RuleTable.model_fields}
        return {name: value for name, value in found.items() if value is not None}


class NamedRule(RuleTable):
    name: str = Field(min_length=1, max_length=200)


class MemberRule(RuleTable):
    name: str | None = Field(None, min_length=1, max_length=200)
    url: str | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if (self.name is None) is (self.url is None):
            raise PydanticCustomError("named", "give name or url of the member, and not both")
        return self

    @property
    def key(self) -> str:
        return self.name or plain_url(self.url or "")


class PolicyFile(TomlTable):
    default: RuleTable | None = None
    member: tuple[MemberRule, ...] = ()
    model: tuple[NamedRule, ...] = ()


def read_policy(file: Path) -> PolicyFile:
    """Raises ValueError that names the table and the field."""
    return read_toml(file, PolicyFile)
