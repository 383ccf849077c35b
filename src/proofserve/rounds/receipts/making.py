"""The receipt of one answer."""

from dataclasses import replace

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.answer import FinishedAnswer
from proofserve.protocol.receipts.record import Receipt, Sampling, token_hash
from proofserve.rounds.records import EngineInfo

# Token ids in a receipt's hashes are u32.
_MOST_ID = 2**32 - 1


def receipt_of_answer(answer: FinishedAnswer, engine_info: EngineInfo, now_ms: int) -> Receipt:
    """What the node signs about ``answer``, which must have sketches.

    An answer cannot have ended after ``now_ms``, whatever another process' clock says. Raises
    ProtocolError if the answer has no receipt because its parts do not fit each other.
    """
    facts = engine_info.facts
    if answer.sketches is None or facts.weights_digest is None:
        raise ProtocolError("sketches", "a receipt needs sketches and a digest of the weights")
    for name, ids in (("prompt_ids", answer.prompt_ids), ("output_ids", answer.output_ids)):
        if ids and not 0 <= min(ids) <= max(ids) <= _MOST_ID:
            raise ProtocolError(name, "has a token id that is not in 0..2^32 - 1")
    return Receipt(
        response_id=answer.response_id,
        choice=answer.choice,
        model=engine_info.model_names[0],
        adapter=answer.adapter,
        weights_digest=facts.weights_digest,
        sampling=_with_floats(answer.sampling),
        prompt_tokens=len(answer.prompt_ids),
        prompt_sha256=token_hash(answer.prompt_ids),
        output_tokens=len(answer.output_ids),
        output_sha256=token_hash(answer.output_ids),
        sketch_key=answer.sketch_key,
        k_dim=answer.k_dim,
        sketches=answer.sketches,
        finish_reason=answer.finish_reason,
        versions=tuple(sorted(engine_info.versions.items())),
        created_ms=min(answer.created_ms, now_ms),
    )


def _with_floats(sampling: Sampling) -> Sampling:
    """The digest is of JSON, where 1 and 1.0 differ; readers make every such number a float."""
    return replace(
        sampling,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        presence_penalty=float(sampling.presence_penalty),
        frequency_penalty=float(sampling.frequency_penalty),
        repetition_penalty=float(sampling.repetition_penalty),
    )
