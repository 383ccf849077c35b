"""What an operator may do with a node from its page: calls of the ordinary API."""

from proofserve.api.node import Deployment
from proofserve.dashboard.records import ActionField, ActionOffer
from proofserve.protocol import DEFAULT_SCHEME, SEQ_LEN, default_k_dim
from proofserve.rounds.records import RoundSpec
from proofserve.rounds.state import State
from proofserve.rounds.status import Status
from proofserve.wire.paths import PROOFS

_STOP = ActionOffer(
    id="stop",
    label="Stop round",
    path=f"{PROOFS}/stop",
    confirmation="The round ends, its finished results are stored and sent, and queued jobs are"
    " cancelled. A new round has to be ordered again.",
    dangerous=True,
)
_CONTINUE = ActionOffer(
    id="continue",
    label="Continue round",
    path=f"{PROOFS}/phase/generate",
    confirmation="The configured distance round generates again, from its next nonce.",
)


def offered(deployment: Deployment, status: Status) -> tuple[ActionOffer, ...]:
    """The actions that fit the state of the node."""
    if status.state in (State.GENERATING, State.VALIDATING):
        return (_STOP,)
    start = _start(deployment, status.spec)
    is_distance = status.spec is not None and status.spec.target is not None
    return (_CONTINUE, start) if is_distance else (start,)


def _start(deployment: Deployment, last: RoundSpec | None) -> ActionOffer:
    """Start a round of artifacts: as the last one was, or with values that fit the deployment."""
    engine_info = deployment.engine_info
    seq_len = deployment.seq_len or min(SEQ_LEN, engine_info.max_seq_len)
    scheme = deployment.scheme or DEFAULT_SCHEME
    k_dim = deployment.k_dim or default_k_dim(scheme)
    block_hash, height, key, node_id, node_count = "", 0, "", 0, 1
    body: dict[str, object] = {}
    if last is not None:
        block_hash, height = last.work.block.hash, last.work.block.height
        key = last.work.public_key
        if last.lane is not None:
            node_id, node_count = last.lane.node_id, last.lane.node_count
            body = {"group_id": last.lane.group_id, "n_groups": last.lane.n_groups}
        if last.target is None:
            wire = last.work.scheme.to_wire()
            scheme, k_dim, seq_len = str(wire["name"]), int(wire["k_dim"]), last.work.seq_len
            body |= {"commit": "roots" if last.commits_roots else "vectors"}
    text, integer = _text, _integer
    return ActionOffer(
        id="start",
        label="Start round",
        path=f"{PROOFS}/init/generate",
        confirmation="The node generates proofs in the time that chat leaves free, until the round"
        " is stopped.",
        body={**body, "params": {"model": engine_info.model_names[0]}},
        fields=(
            text("block_hash", "Block hash", block_hash),
            integer("block_height", "Block height", height),
            text("public_key", "Public key", key),
            integer("node_id", "Node id", node_id),
            integer("node_count", "Nodes", node_count),
            text("scheme", "Scheme", scheme),
            integer("params.seq_len", "Tokens per nonce", seq_len),
            integer("params.k_dim", "Dimensions", k_dim),
            ActionField(name="url", label="Callback URL; without one, results stay in /results"),
        ),
    )


def _text(name: str, label: str, value: str) -> ActionField:
    return ActionField(name=name, label=label, value=value, required=True)


def _integer(name: str, label: str, value: int) -> ActionField:
    return ActionField(name=name, label=label, kind="integer", value=value, required=True)
