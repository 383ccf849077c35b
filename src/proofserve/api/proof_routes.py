"""Calls that make a node work: rounds, jobs, verdicts about claims, openings, bare forwards.

Of both protocols (A.7, B.5, B.6, P.1, P.2), and openings of committed rounds (ADR 26).
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Query, Request

from proofserve.api import schemas, translate
from proofserve.api.access import ApiError, Role
from proofserve.api.node import (
    Deployment,
    Node,
    ServedCaller,
    ServedNode,
    joined,
    pow_status,
    require_engine,
    while_connected,
)
from proofserve.api.requests import proof_router
from proofserve.api.response_models import (
    JobAnswer,
    JudgeAnswer,
    MeasureAnswer,
    OpeningModel,
    OpeningsAnswer,
    PowAnswer,
    ResultRow,
    ResultsPage,
    StartAnswer,
    StateOnly,
    StopAnswer,
    StoppedPowStatus,
    documented,
)
from proofserve.protocol import SEQ_LEN
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import MAX_NONCE, check_nonces, draw
from proofserve.protocol.sketch import cost_of_few_values
from proofserve.rounds.errors import EngineFault, EngineGone, OutboxUnavailable, Refusal, Refused
from proofserve.rounds.ports import Measure
from proofserve.rounds.state import Move, State
from proofserve.wire.callbacks import outcome_body
from proofserve.wire.records import opening_record, result_record
from proofserve.wire.status import PowStatus

_EXAMPLES = {
    "artifact": {"summary": "artifact protocol", "value": schemas.ARTIFACT_ROUND_EXAMPLE},
    "distance": {"summary": "distance protocol", "value": schemas.DISTANCE_ROUND_EXAMPLE},
}


def add_to(router: APIRouter) -> None:
    configured = documented(PowAnswer, 409, 422, 503)
    changed = documented(PowAnswer, 400, 409, 503)
    router.post("/init/generate", **documented(StartAnswer, 400, 409, 422, 503))(start_round)
    router.post("/init", **configured)(init)
    router.post("/init/validate", **configured)(init_validate)
    router.post("/phase/generate", **changed)(phase_generate)
    router.post("/phase/validate", **changed)(phase_validate)
    router.post("/stop", **documented(StopAnswer, 503))(stop)
    router.get("/results", **documented(ResultsPage, 422, 503))(results)
    router.post("/generate", **documented(JobAnswer, 400, 409, 422, 503))(generate)
    router.get("/generate/{request_id}", **documented(JobAnswer, 404, 503))(job_result)
    router.post("/validate", **documented(JudgeAnswer, 400, 409, 422, 503))(validate)
    router.post("/open", **documented(OpeningsAnswer, 404, 409, 410, 422, 503))(open_vectors)


# -- rounds ----------------------------------------------------------------------------------------


async def start_round(
    node: ServedNode, body: Annotated[schemas.AnyRoundRequest, Body(openapi_examples=_EXAMPLES)]
) -> StartAnswer:
    """Start generating proofs, until stopped. 409 while a round runs.

    ``r_target`` in the body selects the distance protocol, ``params`` the artifact protocol.
    """
    warning = await _configure(node, body, Move.START)
    of_round: PowStatus | StateOnly = StateOnly(status=State.GENERATING)
    if isinstance(body, schemas.DistanceRoundRequest):
        of_round = await pow_status(node, node.manager.status())
    return StartAnswer(status="OK", pow_status=of_round, warning=warning)


async def init(node: ServedNode, body: schemas.DistanceRoundRequest) -> PowAnswer:
    """Configure a round without starting it. 409 while a round generates."""
    return await _ok(node, await _configure(node, body, Move.INIT))


async def init_validate(node: ServedNode, body: schemas.DistanceRoundRequest) -> PowAnswer:
    """Configure the round by which claims are judged, and send verdicts to its callback_url.

    409 while a round generates.
    """
    return await _ok(node, await _configure(node, body, Move.INIT_VALIDATE))


async def phase_generate(node: ServedNode) -> PowAnswer:
    """Start the configured round, or continue it where it stopped. 400 if there is no round."""
    await require_engine(node)
    await node.manager.generate()
    return await _ok(node)


async def phase_validate(node: ServedNode) -> PowAnswer:
    """Stop generating, and judge claims by the configured round. 400 if there is no round."""
    await require_engine(node)
    await node.manager.validate()
    return await _ok(node)


async def _configure(
    node: Node, body: schemas.RoundRequest | schemas.DistanceRoundRequest, move: Move
) -> str | None:
    """Configure the round of ``body``; returns a warning about it, None for none."""
    round_id = str(uuid.uuid4())
    if isinstance(body, schemas.DistanceRoundRequest):
        field, spec = "callback_url", translate.distance_round(body, node.deployment, round_id)
    else:
        field, spec = "url", translate.artifact_round(body, node.deployment, round_id)
    of_url = await translate.url_warning(field, spec.url, node.deployment)
    await require_engine(node)
    await node.manager.configure(spec, move)
    # For /status.
    node.url_warnings.clear()
    if of_url is not None:
        node.url_warnings[round_id] = of_url
    of_engine = None
    with contextlib.suppress(EngineFault, EngineGone):
        of_engine = (await node.manager.engine_gauges()).warning
    return joined(of_url, cost_of_few_values(spec.work.scheme), of_engine)


async def _ok(node: Node, warning: str | None = None) -> PowAnswer:
    of_round = await pow_status(node, node.manager.status())
    return PowAnswer(status="OK", pow_status=of_round, warning=warning)


async def stop(node: ServedNode) -> StopAnswer:
    """Store finished results, stop the round, and cancel queued jobs."""
    await node.manager.stop()
    status = node.manager.status()
    of_round: StoppedPowStatus | StateOnly = StateOnly(status=status.state)
    if status.spec is None or status.spec.target is not None:
        found = await pow_status(node, status)
        of_round = StoppedPowStatus(status=status.state, **dict(found))
    return StopAnswer(status="OK", pow_status=of_round)


async def results(
    node: ServedNode,
    after: Annotated[int, Query(ge=0, le=MAX_NONCE)] = 0,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
) -> ResultsPage:
    """Stored results with ``seq > after``. The next page begins after ``next_after``.

    A row has ``vector_b64`` (artifact protocol), ``dist`` (a winner of the distance protocol)
    or ``error``.
    """
    rows = await node.outbox.results(after, limit)
    shown = [ResultRow(**result_record(row)) for row in rows]
    return ResultsPage(results=shown, next_after=rows[-1].seq if rows else after)


# -- jobs and claims -------------------------------------------------------------------------------


async def generate(
    request: Request, node: ServedNode, caller: ServedCaller, body: schemas.JobRequest
) -> JobAnswer:
    """Prove the given nonces, or judge claims about them, after the running round.

    A validator's key may have nonces proved and wait for them, within its budget of an hour.
    """
    if caller.role is Role.VALIDATOR:
        _require_challenge(body, node.deployment)
    job = translate.job(body, node.deployment)
    of_url = await translate.url_warning("url", job.url, node.deployment)
    warning = joined(of_url, cost_of_few_values(job.work.scheme))
    await require_engine(node)
    if not body.wait:
        if job.url is not None:
            await _require_callback_room(node)
        request_id = await node.manager.submit(job)
        count = len(job.nonces)
        return JobAnswer(
            status="queued", request_id=request_id, queued_count=count, warning=warning
        )
    with node.call_limits.waiting(), node.call_limits.challenge(caller, len(job.nonces)):
        outcome = await while_connected(request, node.manager.run(job))
    request_id, done = str(uuid.uuid4()), outcome_body(job, outcome)
    return JobAnswer(status="completed", request_id=request_id, warning=warning, **done)


async def job_result(node: ServedNode, request_id: str) -> JobAnswer:
    """The state of a queued job, and its result. 404 once the result has expired."""
    view = await node.manager.result(request_id)
    done = view.completed and outcome_body(view.completed.job, view.completed.outcome)
    return JobAnswer(
        status=view.state.value, request_id=view.request_id, error=view.error, **(done or {})
    )


def _require_challenge(body: schemas.JobRequest, deployment: Deployment) -> None:
    """Raise ApiError for what only an operator may order, and ProtocolError for long nonces."""
    if not body.wait or body.validation is not None or body.url is not None:
        raise ApiError(
            "not_allowed",
            "a validator's key has nonces computed and waits for them: send wait true, and neither"
            " url nor validation",
        )
    # Chat waits for a forward, which is as long as its nonces are.
    longest = deployment.seq_len or SEQ_LEN
    if body.params.seq_len > longest:
        raise ProtocolError(
            "params.seq_len",
            f"{body.params.seq_len} is more than the {longest} tokens of a validator's nonce here;"
            " the operator may fix another number (POC_SEQ_LEN)",
        )


async def _require_callback_room(node: Node) -> None:
    """Raises Refused. The outbox never drops a callback to make room for another."""
    limit, waiting = node.deployment.max_callbacks, 0
    # While the outbox cannot be read, work is still accepted.
    with contextlib.suppress(OutboxUnavailable):
        waiting = (await node.outbox.gauges()).pending
    if waiting >= limit:
        raise Refused(
            Refusal.QUEUE_FULL, f"Callback queue full: {waiting} callbacks wait, limit is {limit}"
        )


async def validate(
    request: Request, node: ServedNode, caller: ServedCaller, body: schemas.DistanceClaimsRequest
) -> JudgeAnswer:
    """Recompute a prover's winners and judge them by the configured round.

    400 if there is no round, 409 if the round is for another block. Chat goes first. A validator's
    call is within its budget of an hour, and no part of the round: its verdict is not sent.
    """
    claims = translate.distance_claims(body, node.deployment)
    await require_engine(node)
    of_round = caller.role is not Role.VALIDATOR
    with node.call_limits.waiting(), node.call_limits.challenge(caller, len(claims.nonces)):
        verdict = await while_connected(request, node.manager.judge(claims, of_round))
    return JudgeAnswer(
        status="OK",
        fraud_detected=verdict.fraud_detected,
        computed_distances=list(verdict.computed),
        n_invalid=verdict.n_invalid,
        probability_honest=verdict.probability_honest,
    )


# -- openings --------------------------------------------------------------------------------------


async def open_vectors(node: ServedNode, body: schemas.OpenRequest) -> OpeningsAnswer:
    """The vectors of some nonces of a committed round, with their paths to the posted roots.

    404 for a round or nonce that is unknown, 409 for a round that publishes vectors, 410 for
    vectors that are deleted. A refused nonce is named, and none is opened then.
    """
    check_nonces("nonces", body.nonces or ())
    with node.call_limits.waiting():
        committed = await node.outbox.committed_round(
            body.block_hash, body.public_key, body.round_id
        )
        nonces, lane, size = body.nonces or [], committed.lane, committed.next_index
        if (seed := body.seed) is not None:
            # A thread, because a draw hashes every nonce of the round.
            drawn = asyncio.to_thread(lambda: draw(lane.batch(0, size), seed, body.count))
            nonces = [*await drawn]
        openings = await node.outbox.openings(committed, nonces)
    opened = [OpeningModel(**opening_record(each)) for each in openings]
    return OpeningsAnswer(
        round_id=committed.round_id, committed=committed.next_index, openings=opened
    )


# -- measuring -------------------------------------------------------------------------------------


def measure_router(
    get_node: Callable[[Request], Node],
    measure_of: Callable[[Request], Measure],
    has_keys: bool = True,
) -> APIRouter:
    """``POST /measure``: bare forwards, for benchmarks; only on servers with ``--poc-measure``."""

    async def measure(
        request: Request, node: ServedNode, body: schemas.MeasureRequest
    ) -> MeasureAnswer:
        """Nonces per second of the worker alone: no HTTP, no rounds, no outbox."""
        work = translate.measured_work(body, node.deployment)
        nonces = range(body.batch_size)
        proved, seconds = await measure_of(request)(work, nonces, body.forwards)
        return MeasureAnswer(
            nonces_per_second=proved / seconds,
            seconds_per_forward=seconds / body.forwards,
            sequences=proved * work.scheme.sequences_per_nonce // body.forwards,
        )

    made = proof_router(get_node, has_keys)
    made.post("/measure", **documented(MeasureAnswer, 409, 422, 503))(measure)
    return made
