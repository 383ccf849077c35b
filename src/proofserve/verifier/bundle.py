"""A verdict as a file, for a third party: what the node signed, and all that judged it.

It needs no trust in who made it: the claims are the node's own signed answers, and the verdict is
computed again from them, with the published weights or with the signed answers of other nodes.
"""

import base64
import binascii
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from proofserve.host import machine
from proofserve.protocol.codec import encode
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim, claim_errors
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient, Transcript, replaying
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import ReportedError, read_json, write_json, written
from proofserve.verifier.calibration_file import CalibrationFile, GivenThreshold
from proofserve.verifier.challenge import FreshChallenge, answer, nonces_of
from proofserve.verifier.claims import ClaimedArtifacts, Selection, from_node
from proofserve.verifier.judging import JudgingOptions, VerdictRecord, VerdictReport
from proofserve.verifier.nodes.judging import TrustedNodes, judged_by_nodes
from proofserve.verifier.nodes.sources import NONCES, KnownNode, NodeSource, Witnesses, asked
from proofserve.verifier.orders import WorkOptions, order_of
from proofserve.wire.signed import SignedAnswer

# vLLM's own list of models, which no node signs: the first name is that of an order.
_UNSIGNED: Final = "/v1/models"
# What a bundle says of ``JudgingOptions`` as it is.
_SAID_OF_OPTIONS: Final = ("tests", "alpha", "beta", "share", "p_fraud", "sequential", "kept")
# Distances of the same vectors, by processors that add up otherwise.
_ROUNDING: Final = 1e-4


# As long as a date has four digits for its year.
UnixMilliseconds = Annotated[int, Field(ge=0, lt=253_402_300_800_000)]


class UnsignedError(ReportedError):
    """There is no evidence to write down, and the verdict stands all the same."""


class AnswerRecord(BaseModel):
    """A ``SignedAnswer``; ``signature`` in base64 is empty for one that needs none."""

    model_config = ConfigDict(extra="forbid")

    method: str
    target: str
    request: str
    body: str
    time_ms: UnixMilliseconds
    signature: str

    @classmethod
    def of(cls, answer: SignedAnswer) -> Self:
        """Raises UnsignedError for a body that is no text."""
        try:
            request, body = answer.request.decode(), answer.body.decode()
        except UnicodeDecodeError as error:
            raise UnsignedError(f"no bundle: {answer.target} is not in UTF-8") from error
        text = base64.b64encode(answer.signature).decode("ascii")
        about = {"method": answer.method, "target": answer.target, "time_ms": answer.time_ms}
        return cls(**about, request=request, body=body, signature=text)

    def answer(self, public_key: bytes) -> SignedAnswer:
        """Raises ReportedError for a signature that is not base64."""
        try:
            signature = base64.b64decode(self.signature, validate=True)
        except binascii.Error as error:
            raise ReportedError(f"{self.method} {self.target}: signature: not base64") from error
        texts = self.request.encode(), self.body.encode()
        return SignedAnswer(self.method, self.target, *texts, self.time_ms, public_key, signature)


class BundledOptions(BaseModel):
    """``JudgingOptions``; of a calibration and of suspected checkpoints the digests alone."""

    model_config = ConfigDict(extra="forbid")

    tests: tuple[str, ...]
    alpha: float
    beta: float
    share: float
    p_fraud: float
    sequential: bool
    kept: float
    dist_threshold: float | None
    p_mismatch: float | None
    calibration: str | None
    suspects: tuple[str, ...]

    def options(self, measured: CalibrationFile | None) -> JudgingOptions:
        given = None
        if self.dist_threshold is not None and self.p_mismatch is not None:
            given = GivenThreshold(self.dist_threshold, self.p_mismatch)
        said = self.model_dump(include={*_SAID_OF_OPTIONS})
        return JudgingOptions(**said, threshold=given or measured)


class BundledWitness(BaseModel):
    """A node that the validator trusted, or one that cheats on purpose, and what it answered."""

    model_config = ConfigDict(extra="forbid")

    name: str
    url: str
    is_suspect: bool
    public_key: str = Field(pattern="^[0-9a-f]{64}$")
    answers: list[AnswerRecord]

    @classmethod
    def of(cls, source: NodeSource, is_suspect: bool) -> Self:
        """Raises UnsignedError for a file, and for a node that does not sign."""
        if not source.is_node:
            raise UnsignedError(f"no bundle: what the file {source.place} says is not signed")
        key = HeardNode(source.place, source.heard).public_key()
        return cls(
            name=source.name,
            url=source.place,
            is_suspect=is_suspect,
            public_key=key.hex(),
            answers=records_of(source.heard),
        )

    def node(self, order: Work, nonces: Sequence[int]) -> KnownNode:
        """What it said about ``nonces``. Raises ReportedError."""
        key = bytes.fromhex(self.public_key)
        again = replaying([each.answer(key) for each in self.answers])
        return asked(NodeSource(self.name, self.url), order, nonces, again)


class Bundle(BaseModel):
    """``challenge`` is what was asked of a node, or ``wanted`` says which round of it was read.

    ``ours`` are the validator's vectors, by nonce, of those that had one to compare with, in
    base64; ``seed`` drew the sample of ``most`` nonces. ``digests`` are SHA-256 of all other
    fields: they show damage, and no lie. ``witnesses`` judged in the place of weights, if there are
    any; ``ours`` are then the vectors of one of them.
    """

    model_config = ConfigDict(extra="forbid")

    format: Literal["proofserve-bundle"]
    version: Literal[1]
    made_ms: UnixMilliseconds
    made_on: dict[str, str | int]
    url: str
    public_key: str = Field(pattern="^[0-9a-f]{64}$")
    answers: list[AnswerRecord]
    challenge: FreshChallenge | None
    wanted: Selection | None
    seed: str
    most: int | None
    judged_by: BundledOptions
    ours: dict[int, str]
    witnesses: list[BundledWitness] = []
    report: VerdictRecord
    digests: dict[str, str]

    def claims(self) -> tuple[ClaimedArtifacts, Work]:
        """What the node answered, read as when the bundle was made. Raises ReportedError."""
        key = bytes.fromhex(self.public_key)
        again = replaying([each.answer(key) for each in self.answers])
        with NodeClient(self.url, replayed=again) as node:
            if self.challenge is not None:
                asked = self.challenge
                if asked.nonces != nonces_of(asked.work.block_hash, len(asked.nonces)):
                    raise ReportedError("the validator chose the nonces: they are not of the block")
                found = answer(node, self.challenge, math.inf)
                return found.claimed, found.order
            if self.wanted is None:
                raise ReportedError("challenge: there is none, and no round either")
            if self.wanted.lane is not None:
                # Of another lane an honest node would seem to have left nonces out.
                raise ReportedError("the validator says what the node owed, without a signature")
            claimed = from_node(node, self.wanted)
        # What the node was asked for is what it says itself, and nothing else.
        return claimed, order_of(claimed, WorkOptions())

    def beside_witnesses(self) -> Callable[[str], VerdictReport]:
        """The verdict by the witnesses, by a seed. Raises ReportedError."""
        claimed, order = self.claims()
        sample = draw(claimed.nonces, self.seed, NONCES if self.most is None else self.most)
        references, suspects = (
            [each.node(order, sample) for each in self.witnesses if each.is_suspect is cheats]
            for cheats in (False, True)
        )
        options = self.judged_by.options(None)

        def judge(seed: str) -> VerdictReport:
            # They answered about these nonces alone: another seed has them in another order.
            known = Witnesses(references, suspects, draw(sample, seed, None))
            return judged_by_nodes(claimed, known, options, seed)

        return judge


@dataclass(frozen=True, slots=True)
class HeardNode:
    """What the node at ``url`` answered: to a ``challenge``, or about the round ``wanted``."""

    url: str
    transcript: Transcript
    challenge: FreshChallenge | None = None
    wanted: Selection | None = None

    def public_key(self) -> bytes:
        """That of all answers. Raises UnsignedError if the node did not sign them."""
        keys = {each.public_key for each in self.transcript.signed}
        unsigned = [each.target for each in self.transcript.unsigned if each.target != _UNSIGNED]
        if len(keys) == 1 and not unsigned:
            return next(iter(keys))
        what = f"{unsigned[0]} came without" if unsigned else f"{len(keys)} keys"
        raise UnsignedError(
            f"no bundle: {self.url} does not sign its answers ({what}): it is a fleet"
            " without a FLEET_KEY_FILE, its proofserve is too old, or a proxy changes them; the"
            " report alone is no evidence"
        )


def write_bundle(
    file: Path | None,
    heard: HeardNode,
    report: VerdictReport,
    most: int | None,
    judged_with: tuple[Path | None, Sequence[Path]],
    nodes: TrustedNodes | None = None,
) -> str:
    """Write the verdict of ``report`` about up to ``most`` nonces, if there is a ``file`` for it.

    ``judged_with`` are the file of the calibration and suspected checkpoints; or else ``nodes``
    judged. Returns why nothing was written, else an empty text: a node that does not sign must not
    end its own verdict. Raises OSError.
    """
    if file is None:
        return ""
    try:
        public_key, every = heard.public_key(), heard.transcript
        answers = [each.model_dump() for each in records_of(every)]
        said = ((nodes.references, False), (nodes.suspects, True)) if nodes else ()
        known = (BundledWitness.of(each, cheats) for several, cheats in said for each in several)
        witnesses = [each.model_dump() for each in known]
    except UnsignedError as error:
        return str(error)
    options, (calibration, suspects) = report.options, judged_with
    threshold = options.threshold if isinstance(options.threshold, GivenThreshold) else None
    fields = {
        "format": "proofserve-bundle",
        "version": 1,
        "made_ms": int(time.time() * 1000),
        "made_on": machine(),
        "url": heard.url,
        "public_key": public_key.hex(),
        "answers": answers,
        "challenge": heard.challenge and asdict(heard.challenge),
        "wanted": heard.wanted and asdict(heard.wanted),
        "seed": report.seed,
        "most": most,
        "judged_by": {
            **{name: getattr(options, name) for name in _SAID_OF_OPTIONS},
            "dist_threshold": threshold and threshold.dist_threshold,
            "p_mismatch": threshold and threshold.p_mismatch,
            "calibration": calibration and digest_of_file(calibration),
            "suspects": digests_of(suspects),
        },
        "ours": _ours(report),
        "witnesses": witnesses,
        "report": report.record(),
    }
    # As it will be read.
    fields = json.loads(json.dumps(fields, default=str))
    digests = {name: _digest(value) for name, value in fields.items()}
    write_json(file, {**fields, "digests": digests})
    return ""


def records_of(heard: Transcript) -> list[AnswerRecord]:
    """Raises UnsignedError for an answer that is no text."""
    return [AnswerRecord.of(each) for each in (*heard.unsigned, *heard.signed)]


def digest_of_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests_of(checkpoints: Sequence[Path]) -> list[str]:
    """In their order. Raises ProtocolError for a folder without safetensors files."""
    if not checkpoints:
        return []
    # It imports torch, which the check of a bundle does not need.
    from proofserve.engines.checkpoints import weights_digest  # noqa: PLC0415

    return [weights_digest(each) for each in checkpoints]


def _ours(report: VerdictReport) -> dict[int, str]:
    """The validator's vectors as on the wire: a claim less its error."""
    errors = {e.nonce: e.error for e in report.outcome.errors if e.error is not None}
    claims = [each for each in report.claimed.claims if each.nonce in errors]
    if not errors:
        return {}
    theirs = vectors_of(claims, len(next(iter(errors.values()))))
    texts = encode(np.stack([theirs[nonce] - error for nonce, error in errors.items()]))
    return dict(zip(errors, texts, strict=True))


def faults_of(file: Path) -> Iterator[str]:
    """What does not hold in a bundle: its digests, the node's signatures, and the arithmetic.

    Without a model: whether ``ours`` are the vectors of the published weights is not asked. Raises
    ReportedError for a file that is no bundle.
    """
    # Reading text would hide a changed end of a line.
    bundle, text = read_json(file, Bundle), file.read_bytes().decode()
    raw = json.loads(text)
    if text != written(raw):
        yield "form: the file is not as it was written"
    parts = {name: _digest(value) for name, value in raw.items() if name != "digests"}
    for name in sorted({*parts, *bundle.digests}):
        if parts.get(name) != bundle.digests.get(name):
            yield f"{name}: it is not as it was written"
    yield from _not_signed("answers", bundle.public_key, bundle.answers)
    seen = {bundle.public_key}
    for number, each in enumerate(bundle.witnesses):
        yield from _not_signed(f"witnesses.{number}", each.public_key, each.answers)
        if each.public_key in seen:
            yield f"witnesses.{number}: {each.name} signs with the key of another node here"
        seen.add(each.public_key)
    try:
        claimed, order = bundle.claims()
        yield from _arithmetic(bundle, claimed, order)
        if bundle.witnesses:
            yield from differences(bundle, bundle.beside_witnesses()(bundle.seed))
    except (ReportedError, ProtocolError) as error:
        yield f"answers: {error}"


def _not_signed(where: str, public_key: str, answers: Sequence[AnswerRecord]) -> Iterator[str]:
    key = bytes.fromhex(public_key)
    for number, each in enumerate(answers):
        if each.target != _UNSIGNED and not each.answer(key).is_signed:
            text = f"{each.method} {each.target} is not signed by the node's key"
            yield f"{where}.{number}: {text}"


def _arithmetic(bundle: Bundle, claimed: ClaimedArtifacts, order: Work) -> Iterator[str]:
    """Whether sample, distances and verdict of the report follow from the rest."""
    report = bundle.report
    if (report["block_hash"], report["public_key"]) != (claimed.block_hash, claimed.public_key):
        yield "report: block_hash or public_key is not that of the answers"
    used = draw(claimed.nonces, bundle.seed, bundle.most)[: report["nonces_used"]]
    of_sample = [nonce for nonce in used if nonce in bundle.ours]
    if len(of_sample) < len(bundle.ours):
        yield "ours: it has nonces that the seed did not draw"
    without = {each["nonce"] for each in report["mismatches"] if each["distance"] is None}
    if missing := [nonce for nonce in used if nonce not in {*of_sample, *without}]:
        yield f"ours: there is no vector for nonce {missing[0]}, which the seed drew"
    ours = vectors_of([Claim(nonce, bundle.ours[nonce]) for nonce in of_sample], order.width)
    claims = [each for each in claimed.claims if each.nonce in ours]
    for error in claim_errors(of_sample, ours, claims, order.width):
        said = report["distances"].get(error.nonce, math.nan)
        if not math.isclose(error.distance, said, rel_tol=_ROUNDING, abs_tol=1e-9):
            yield f"report: the distance of nonce {error.nonce} is {error.distance:.4g}, not {said}"
    results = {each["result"] for each in report["findings"]}
    verdict, fraud, honest = report["verdict"], SequentialResult.FRAUD, SequentialResult.HONEST
    if (verdict == fraud) is not (fraud in results) or (verdict == honest and fraud in results):
        yield f"report: the verdict is {verdict}, its findings say {', '.join(sorted(results))}"


def differences(bundle: Bundle, again: VerdictReport) -> Iterator[str]:
    """Where a verdict that was computed again is another one."""
    made: Mapping[str, Any] = json.loads(json.dumps(again.record(), default=str))
    report = bundle.report
    verdict, used = report["verdict"], report["nonces_used"]
    for name, known in (("verdict", verdict), ("nonces_used", used)):
        if made[name] != known:
            yield f"{name}: {made[name]}, the bundle says {known}"
    said = {each["test"]: str(each["result"]) for each in report["findings"]}
    found = {each["test"]: each["result"] for each in made["findings"]}
    if said != found:
        yield f"findings: {found}, the bundle says {said}"


def _digest(value: object) -> str:
    """SHA-256 of JSON with sorted keys, without spaces, in ASCII."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
