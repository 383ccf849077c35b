"""Variables of a fleet's controller and workers, which are also options, and its TOML files."""

from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings

from proofserve.fleet.records import MemberSource
from proofserve.fleet.sources import Address, address, plain_url
from proofserve.fleet.verification_records import AfterConviction, JudgedBy
from proofserve.settings.node import (
    CONFIG,
    BearerKey,
    BearerKeys,
    ServiceSettings,
    Texts,
    TomlTable,
    read_tables,
)

# Prefix of the controller's variables.
PREFIX = "FLEET_"
FLEET_CONFIG = CONFIG | {"env_prefix": PREFIX}


class FleetSettings(ServiceSettings):
    """The settings of a controller; each field is a variable and an option of ``fleet serve``."""

    model_config = FLEET_CONFIG

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(7100, ge=0, le=65535)
    """Port to listen on."""
    public_url: str | None = None
    """Where members reach this controller; unset: http://HOST:PORT."""
    database: str = "proofserve-fleet.sqlite"
    """SQLite file, or postgresql://USER:PASSWORD@HOST/NAME for several controllers."""
    lanes: int = Field(64, ge=1, le=4096)
    """Lanes of a round: each member, and each restart of one without --resume, takes one."""
    member: Texts = ()
    """A member: http://HOST:PORT. Several: with commas, or repeat the option."""
    members_file: Path | None = None
    """TOML file of [[member]] tables: url, and if you like name and key."""
    dns: str | None = None
    """http://NAME:PORT: every address of this name is a member, looked up again each 30 s."""
    key_file: Path | None = None
    """Key that signs answers, of all controllers; unset: one is made beside an SQLite file."""
    join_key: BearerKeys = ()
    """Keys with which servers join (serve --poc-fleet); operators' keys may join, too."""
    join_allow: Texts = ("loopback",)
    """Where servers that join may be: http://host:port, a network like 10.0.0.0/8, or loopback."""
    member_key: SecretStr | None = None
    """The operators' key of all members; better as a variable than as an option."""
    member_secret: SecretStr | None = None
    """Secret with which members sign callbacks (their POC_CALLBACK_SECRET)."""
    policy: Path | None = None
    """TOML file: how often members are verified, by which tests, and what a conviction does."""
    weights_digest: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Only members with these weights (weights_digest of /versions). Unset: as most members."""
    lost_after_sec: float = Field(10.0, ge=2)
    """A member that does not answer for this long is lost."""
    look_sec: float = Field(2.0, gt=0)
    """Longest time for a member to answer a look, seconds."""
    start_wait_sec: float = Field(3.0, ge=0)
    """Longest time that a start waits for the members; slower ones begin after its answer."""
    stop_wait_sec: float = Field(10.0, ge=0)
    """Longest time that a stop waits for results; later ones are still stored."""
    max_clock_offset_sec: float = Field(60.0, gt=0)
    """A member whose clock is further off is kept out, seconds."""
    keep_results_sec: float = Field(86_400.0, ge=0)
    """Delivered results and callbacks are deleted after this time, seconds; 0: never."""
    keep_verdicts_days: float = Field(0.0, ge=0)
    """Verdicts are deleted after this time, days, but for each member's newest; 0: never."""

    @field_validator("dns")
    @classmethod
    def _plain(cls, url: str | None) -> str | None:
        return None if url is None else plain_url(url)


class FleetWorkerSettings(BaseSettings):
    """The settings of a worker; each field is a variable and an option of ``fleet worker``."""

    model_config = FLEET_CONFIG

    database: str = "proofserve-fleet.sqlite"
    """The database of the fleet: SQLite file, or postgresql://USER:PASSWORD@HOST/NAME."""
    model: Texts = ()
    """Folder of a checkpoint whose members this worker verifies. Several: repeat the option."""
    device: str = "cpu"
    """Where to recompute: cpu, or cuda."""
    forward_batch: int = Field(8, ge=1)
    """Nonces that are recomputed in one forward."""
    member_key: SecretStr | None = None
    """The operators' key of all members, to have them open roots; better as a variable."""
    attempts: int = Field(3, ge=1)
    """How often this worker tries a job that a fault ended, with pauses of 1 s, 2 s, ..."""
    stop_wait_sec: int = Field(25, ge=0)
    """Longest time that a worker finishes its job after SIGTERM; then another one gets it."""
    worker_name: str | None = Field(None, min_length=1, max_length=100)
    """How operators see this worker; unset: the host's name and a number."""


class ListedMember(TomlTable):
    """One ``[[member]]`` of the list; without a key the fleet's key for members is used."""

    url: str = Field(min_length=1)
    name: str | None = Field(None, min_length=1, max_length=200)
    key: BearerKey | None = None


def listed_members(chosen: FleetSettings) -> tuple[Address, ...]:
    """The members that options and the TOML file name. Raises ValueError."""
    found = [address(url, None, MemberSource.LIST) for url in chosen.member]
    if chosen.members_file is not None:
        for each in read_tables(chosen.members_file, "member", ListedMember, fewest=0):
            key = None if each.key is None else each.key.get_secret_value()
            found.append(address(each.url, each.name, MemberSource.LIST, key))
    if len({each.url for each in found}) < len(found):
        raise ValueError("a member is listed twice: each URL once, in --member or --members-file")
    return tuple(found)


class RuleTable(TomlTable):
    """A rule. A field that ``[[member]]`` or ``[[model]]`` leaves out is that of ``[default]``."""

    by: JudgedBy | None = None
    every_s: float | None = Field(None, alias="every_sec", gt=0, allow_inf_nan=False)
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
    unproved_share: float | None = Field(None, ge=0, le=1)
    attempts: int | None = Field(None, ge=1, le=100)
    timeout_s: float | None = Field(None, alias="timeout_sec", gt=0, allow_inf_nan=False)
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
        """By the names of ``VerificationRule``."""
        return self.model_dump(include=set(RuleTable.model_fields), exclude_none=True)


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
