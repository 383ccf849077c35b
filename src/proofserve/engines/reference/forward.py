"""Forwards of several networks side by side, one layer after the other; what they read of chats.

What all of them read of a checkpoint is read once, and one layer is in memory at a time, with one
changed copy of it.
"""

import copy
import ctypes
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from proofserve.engines.reference.emulation import emulated
from proofserve.engines.reference.kernels import Point
from proofserve.engines.reference.network import CacheRounding, Network
from proofserve.engines.reference.rounding import in_dtype
from proofserve.engines.reference.routing import ChoiceOfExperts, choosing
from proofserve.rounds.errors import EngineFault

# A prompt and the answer to it, as token ids.
Chat = tuple[Sequence[int], Sequence[int]]
# Of a layer's index and what it gives [n, seq_len, hidden]: what the next one reads.
LayerTransform = Callable[[int, Any], Any]
# Hears of a layer, counted from 1, and how many there are.
Passed = Callable[[int, int], None]


@dataclass(slots=True)
class NetworkForward:
    """What a network reads, in batches: embeddings [n, seq_len, hidden] or token ids [n, seq_len].

    Each batch is taken once, and its embeddings are not kept. ``experts`` chooses those of a
    mixture, None for its routers. ``seconds`` were spent in layers.
    """

    network: Network
    batches: Iterable[Tensor]
    transform: LayerTransform | None = None
    experts: ChoiceOfExperts | None = None
    seconds: float = 0.0


@torch.inference_mode()
def last_states(
    forwards: Sequence[NetworkForward], passed: Passed = lambda _index, _of: None
) -> Iterator[Iterator[Tensor]]:
    """The last hidden states [n, seq_len, hidden], after the final norm, of each batch of each.

    The first forward is ahead of the others in each layer: they may use the experts that it chose.
    ``passed`` hears of each layer that all have passed, and how many there are. What was given may
    be dropped before the next is taken. No other thread may use the networks meanwhile. Raises
    CheckpointError if a layer cannot be read, or does not ask its router for experts.
    """
    if not all(each.network.checkpoint.stays_in_memory for each in forwards):
        _give_back_what_is_freed()
    under_way = [[_Batch(each, read) for read in each.batches] for each in forwards]
    layers = max((len(each.network.shapes) for each in forwards), default=0)
    for index in range(layers):
        for each, batches in zip(forwards, under_way, strict=True):
            if index < len(each.network.shapes):
                began = time.monotonic()
                _through_layer(index, each, batches)
                each.seconds += time.monotonic() - began
        passed(index + 1, layers)
    return (map(_Batch.ended, batches) for batches in under_way)


def states(network: Network, read: Tensor, experts: ChoiceOfExperts | None = None) -> Tensor:
    """The last hidden states of one batch."""
    ((found,),) = last_states([NetworkForward(network, [read], experts=experts)])
    return found


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
    if (kernels := network.kernels) is not None:
        made = kernels.product(last.float(), head.weight, split=False)
        return kernels.at(Point.OUTPUTS, made if head.bias is None else made + head.bias)
    logits: Tensor = head(last.to(network.dtype)).float()
    return logits


def _through_layer(index: int, of: NetworkForward, batches: Sequence["_Batch"]) -> None:
    network = of.network
    layer = network.checkpoint.layer(index)
    if network.changes:
        # Modules of its own, which share all weights.
        layer = copy.deepcopy(layer, {id(weight): weight for weight in layer.parameters()})
        for change in network.changes:
            layer = change(index, layer)
    kernels = network.kernels_in.get(index, network.kernels)
    with emulated(layer, kernels, is_layer=True):
        for batch in batches:
            with choosing(index, layer, batch.choice, len(batch.states)):
                made = layer(batch.states, *batch.called[index][0], **batch.called[index][1])
            # In place: states that come and go between others' would scatter the free memory.
            batch.states.copy_(made if of.transform is None else of.transform(index, made))
            del made


def _give_back_what_is_freed() -> None:
    """Have large tensors leave memory when they are freed.

    By default glibc keeps them for later ones, in pieces that often fit none. Other C libraries
    have no such call.
    """
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # M_MMAP_THRESHOLD: the size in bytes from which on freed memory leaves the process.
        set_option(-3, 2**22)


class _Batch:
    """One batch on its way through the layers, and what the decoder hands to each of them."""

    def __init__(self, of: NetworkForward, read: Tensor) -> None:
        self._network = network = of.network
        self._read = read if network.positions is not None else None
        self.choice = of.experts(read) if of.experts else None
        name = "inputs_embeds" if read.is_floating_point() else "input_ids"
        self._options: dict[str, Any] = {name: read, "use_cache": False}
        if network.positions is not None:
            places = torch.arange(read.shape[1], device=read.device)[network.positions]
            self._options[name] = read[:, network.positions]
            self._options["position_ids"] = places.expand(len(read), -1)
        if network.cache is not None:
            cache = _RoundedCache(network.cache)
            self._options |= {"past_key_values": cache, "use_cache": True}
        self._around(None)
        called = [each.called for each in network.checkpoint.decoder.layers]
        self.states: Tensor = called[0][0][0].clone()
        if read.is_floating_point():
            # The second call needs no more than their shape.
            self._options[name] = self.states
        self.called = [(args[1:], options) for args, options in called]

    @torch.inference_mode()
    def ended(self) -> Tensor:
        states = self._around(self.states)
        del self.states
        if (read := self._read) is None:
            return states
        decoder = self._network.checkpoint.decoder
        embedded = read if read.is_floating_point() else decoder.embed_tokens(read)
        every: Tensor = decoder.norm(embedded)
        every[:, self._network.positions] = states
        return every

    def _around(self, result: Tensor | None) -> Tensor:
        """The decoder around its layers, which all give ``result``, or their input."""
        decoder = self._network.checkpoint.decoder
        for each in decoder.layers:
            each.result = result
        with emulated(decoder, self._network.kernels, is_layer=False):
            made: Tensor = decoder(**self._options).last_hidden_state
        for each in decoder.layers:
            each.result = None
        return made


class _RoundedCache(DynamicCache):  # type: ignore[misc]
    """Keeps nothing: a forward reads its own keys and values alone."""

    def __init__(self, rounding: CacheRounding) -> None:
        super().__init__()
        self._rounding = rounding

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        keys, values = self._rounding(layer_idx)
        return in_dtype(keys)(key_states), in_dtype(values)(value_states)
