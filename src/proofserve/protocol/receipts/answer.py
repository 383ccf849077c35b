"""What an engine hands over about one answer that has ended."""

from dataclasses import dataclass

from proofserve.protocol.receipts.record import Sampling


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """``sketches`` are the bytes of a receipt, or None if the engine lost rows of them.

    ``response_id`` is the id that the client got, ``choice`` the index among the request's answers,
    ``adapter`` the name of a LoRA adapter. ``output_ids`` are the tokens that the client got, stop
    tokens included; an answer whose client went away has those that the engine made until then, and
    "abort" as its ``finish_reason``. ``created_ms`` is Unix time in milliseconds, at its end.
    """

    response_id: str
    choice: int
    adapter: str | None
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sketch_key: str
    k_dim: int
    sketches: bytes | None
    finish_reason: str
    created_ms: int
