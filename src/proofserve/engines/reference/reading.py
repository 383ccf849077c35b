"""What a model computes when it reads a chat answer: the states behind its tokens, and logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from proofserve.engines.reference.arithmetic import Arithmetic, Point
from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import ChoiceOfExperts
from proofserve.rounds.errors import EngineFault


def states_of(
    network: Network,
    prompt: Sequence[int],
    output: Sequence[int],
    experts: ChoiceOfExperts | None = None,
) -> Tensor:
    """The states float32 [len(output), hidden] that chose each token of ``output``.

    The state of a position is the output of the final norm; the one before a token chooses it. One
    forward over both. Raises EngineFault if it fails, or is longer than the model allows, and
    CheckpointError if a layer cannot be read.
    """
    ids = [*prompt, *output][:-1]
    if len(ids) > network.max_seq_len:
        raise EngineFault(f"{len(ids)} tokens exceed the model's {network.max_seq_len}")
    if not prompt or not output:
        raise EngineFault("a chat without a prompt or without an answer has no states")
    try:
        read = torch.tensor([ids], device=network.device)
        found = states(network, read, experts)
    except (RuntimeError, ValueError, IndexError) as error:
        raise EngineFault(f"the reference forward failed: {error}") from error
    behind: Tensor = found[0, len(prompt) - 1 :].float()
    return behind


@torch.inference_mode()
def logits_of(network: Network, last: Tensor) -> Tensor:
    """float32 [n, vocabulary] of the ``last`` states [n, hidden], before what sampling changes.

    The product is taken in the network's dtype, as servers do, or by the kernels that it emulates.
    """
    head = network.checkpoint.head
    if network.kernels is not None:
        kernels = Arithmetic(network.kernels)
        made = kernels.product(last.float(), head.weight, split=False)
        return kernels.at(Point.OUTPUTS, made if head.bias is None else made + head.bias)
    logits: Tensor = head(last.to(network.dtype)).float()
    return logits
