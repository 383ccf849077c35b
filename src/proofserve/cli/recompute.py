"""Vectors of a checkpoint or an engine for a validator's command, and what they cost here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from proofserve.cli.servers import ServerOptions, running_engine
from proofserve.cli.session import CommandSession
from proofserve.client.judging import Judging
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import ReportedError
from proofserve.rounds.records import Workload
from proofserve.verifier.claims import kernel_facts
from proofserve.verifier.judging import references_on
from proofserve.verifier.orders import order_for, workload_of
from proofserve.verifier.verification import Truth

if TYPE_CHECKING:
    from proofserve.verifier.plans import Pass
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup


def warn_of_few_values(order: Work, session: CommandSession) -> None:
    from proofserve.protocol.sketch import cost_of_few_values  # noqa: PLC0415 - imports torch

    if (warning := cost_of_few_values(workload_of(order).scheme)) is not None:
        session.tell(warning, "yellow")


def tell_plan(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    passes_of: Callable[["CheckpointValidator"], Sequence["Pass"]],
    about: str,
    session: CommandSession,
) -> None:
    """What work with a checkpoint costs here; a configuration is enough. Raises as ``plan_lines``.

    ``passes_of`` are those over its weights, ``about`` says for what.
    """
    # Loading torch takes seconds, and --help must not wait for it.
    from proofserve.verifier.plans import plan_lines  # noqa: PLC0415

    session.line.step("measuring how fast this machine is, for the plan")
    for line in plan_lines(setup, work, forward_batch, passes_of, about):
        session.tell(line)


def tell_plan_of_verdict(
    judging: Judging,
    order: Work,
    sample: int,
    ran_on: Mapping[str, object],
    session: CommandSession,
) -> None:
    """Of a verdict about ``sample`` nonces at most; ``ran_on`` is what their server says of itself.

    Raises ReportedError, and as ``plan_lines``.
    """
    from proofserve.verifier.plans import expected_passes  # noqa: PLC0415 - as above

    if not sample:
        raise ReportedError("there is no artifact to verify")

    def passes_of(of: "CheckpointValidator") -> Sequence["Pass"]:
        at_once = of.at_once(judging.forward_batch)
        references = references_on(ran_on, of.references, of.variants)
        return expected_passes(judging.options, sample, (of.names, references), at_once)

    what = f"of {sample} nonces until an honest node is cleared"
    work, batch = workload_of(order), judging.forward_batch
    tell_plan(judging.setup(), work, batch, passes_of, what, session)


def by_node(work: Workload, node: NodeClient) -> Callable[[Sequence[int]], list[Claim]]:
    """Let ``node`` compute ``work`` with its first model; the function raises NodeError.

    The node refuses other schemes than its own, because their vectors would convict every prover.
    """
    request = order_for(work, str(node.models()[0]))
    return lambda nonces: node.artifacts(request, nonces)


@contextmanager
def trusted_engine(
    name: str, api_key: str | None, judging: Judging, work: Workload, session: CommandSession
) -> Iterator[tuple[Truth, Sequence[str]]]:
    """The vectors of an engine whose bits count, and the names of its model, while it runs.

    It is the node at a URL, or a vLLM that is started with the checkpoint that judges. Raises
    NodeError, and ReportedError for a node that serves another checkpoint than that.
    """
    from proofserve.engines.checkpoints import weights_digest  # noqa: PLC0415 - imports torch

    served, measured = None, judging.options.calibration
    if judging.model is not None:
        dtype = measured.served_dtype if measured else "auto"
        served = ServerOptions(judging.model, judging.model.name, judging.forward_batch)
        served = replace(served, scheme=work.scheme.name, dtype=dtype)
    with running_engine(name, served, api_key, session) as node:
        compute, width = by_node(work, node), work.scheme.width
        ours = digest = node.weights_digest()
        if judging.model is not None and digest is not None:
            ours = weights_digest(judging.model)
        if ours != digest:
            text = f"{name} serves {digest}, {judging.model} has {ours}"
            raise ReportedError(f"weights_digest: {text}")
        truth = Truth(
            lambda nonces: vectors_of(compute(nonces), width),
            width,
            judging.forward_batch,
            digest,
            name=name,
            facts=kernel_facts(name, node.kernels()),
        )
        yield truth, node.models()
