"""The features whose pins must hold, by what an operator starts."""

from proofserve.engines.vllm.vetting.liveness_pins import LIVENESS
from proofserve.engines.vllm.vetting.node_pins import CHAT_FIRST, ORDERLY_END, PROOFS
from proofserve.engines.vllm.vetting.pins import Feature
from proofserve.engines.vllm.vetting.receipt_pins import RECEIPTS
from proofserve.engines.vllm.vetting.server_pins import EMBEDDED, OFFLINE, SEVERAL

ALL = (PROOFS, CHAT_FIRST, ORDERLY_END, LIVENESS, RECEIPTS, EMBEDDED, SEVERAL, OFFLINE)


def of_node(receipts: bool) -> tuple[Feature, ...]:
    """What a server with proofs needs, with or without receipts."""
    return (PROOFS, CHAT_FIRST, ORDERLY_END, LIVENESS, *([RECEIPTS] if receipts else []))
