"""What a model computes when it reads a chat answer: the states behind its tokens, and logits."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from proofserve.engines.reference.arithmetic import Arithmetic, Point
from proofserve.engines.reference.forward import NetworkForward, last_states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import ChoiceOfExperts
from proofserve.rounds.errors import EngineFault

# A prompt and the answer to it, as token ids.
Chat = tuple[Sequence[int], Sequence[int]]


def states_of(
    network: Network, chats: Sequence[Chat], experts: ChoiceOfExperts | None = None
) -> Iterator[Tensor]:
    """For each chat the states float32 [len(output), hidden] that chose each token of its output.

    The state of a position is the output of the final norm; the one before a token chooses it. One
    forward over each prompt and output, all side by side, so that a layer is read and changed once.
    Raises EngineFault if one fails, or is longer than the model allows, and CheckpointError if a
    layer cannot be read.
    """
    every = [[*prompt, *output][:-1] for prompt, output in chats]
    for (prompt, output), ids in zip(chats, every, strict=True):
        if len(ids) > network.max_seq_len:
            raise EngineFault(f"{len(ids)} tokens exceed the model's {network.max_seq_len}")
        if not prompt or not output:
            raise EngineFault("a chat without a prompt or without an answer has no states")
    try:
        batches = [torch.tensor([ids], device=network.device) for ids in every]
        (found,) = last_states([NetworkForward(network, batches, experts=experts)])
        for (prompt, _), states in zip(chats, found, strict=True):
            yield states[0, len(prompt) - 1 :].float()
    except (RuntimeError, ValueError, IndexError) as error:
        raise EngineFault(f"the reference forward failed: {error}") from error


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
