"""From the bodies of the distance protocol to the frozen records of ``rounds``."""

from proofserve.api.distance_schemas import UNSET, DistanceClaimsRequest, DistanceRoundRequest
from proofserve.api.errors import DeploymentMismatch, LaneMissing
from proofserve.api.node import Deployment
from proofserve.api.translate import check_fits, check_lane, check_list
from proofserve.protocol.distance import DistanceScheme
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import NonceLane
from proofserve.rounds.records import DistanceClaims, RoundSpec, Target, Workload


def generating(order: DistanceRoundRequest, deployment: Deployment, round_id: str) -> RoundSpec:
    """The round that ``order`` asks for, which will generate.

    Raises:
        LaneMissing: it does not say which nonces are the node's.
        Everything else as in ``round_spec``.
    """
    spec = round_spec(order, deployment, round_id)
    if spec.lane is None:
        raise LaneMissing("Node ID and node count must be set")
    return spec


def round_spec(order: DistanceRoundRequest, deployment: Deployment, round_id: str) -> RoundSpec:
    """The round that ``order`` asks for; it has a lane if the node's numbers are set.

    Raises:
        Mismatch: it is for another deployment.
        ProtocolError: a number is out of the range that this deployment or the order itself sets.
    """
    if deployment.seq_len not in (None, order.seq_len):
        raise DeploymentMismatch(
            {
                "error": "params mismatch",
                "requested": {"seq_len": order.seq_len},
                "deployed": {"seq_len": deployment.seq_len},
            }
        )
    check_fits("seq_len", order.seq_len, deployment.engine_info.max_seq_len, "context")
    scheme = DistanceScheme(sign_flips=order.use_sign_flips, layer_hooks=order.use_layer_hooks)
    batch_size = order.batch_size or deployment.default_batch_size
    return RoundSpec(
        round_id=round_id,
        work=Workload(scheme, order.block_hash, order.public_key, order.seq_len),
        block_height=order.block_height,
        lane=_lane(order, batch_size),
        batch_size=batch_size,
        url=order.callback_url,
        target=Target(order.r_target, order.fraud_threshold),
    )


def claims(batch: DistanceClaimsRequest, deployment: Deployment) -> DistanceClaims:
    """The claims of ``batch``. Raises ProtocolError for too many nonces and for repeated ones."""
    check_list(batch.nonces, deployment)
    return DistanceClaims(
        block_hash=batch.block_hash,
        block_height=batch.block_height,
        public_key=batch.public_key,
        node_id=batch.node_id,
        nonces=tuple(batch.nonces),
        distances=tuple(batch.dist),
    )


def _lane(order: DistanceRoundRequest, batch_size: int) -> NonceLane | None:
    if UNSET in (order.node_id, order.node_count):
        if order.node_count == 0:
            raise ProtocolError("node_count", "0 is below 1")
        return None
    lane = NonceLane(order.node_id, order.node_count, order.group_id, order.n_groups)
    check_lane(lane, batch_size)
    return lane
