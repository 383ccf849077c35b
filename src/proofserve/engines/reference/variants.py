"""A network with a part left out or changed, as a cheating prover would do to save work.

Each function returns a new ``Network`` and leaves the old one as it is. The two share the weights
that do not change, so that a variant costs only the memory of what it changes.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from proofserve.engines.reference.network import Network
from proofserve.engines.reference.rounding import Rounding, integers, redrawn

_INT8: Final = "proofserve_int8"


def without_layers(network: Network, left_out: Collection[int]) -> Network:
    """The network without the layers of these indices; each returns its input.

    Without any layer only the final norm remains. Raises ValueError for an index of no layer.
    """
    twin = copied(network)
    for index in left_out:
        if not 0 <= index < len(twin.layers):
            raise ValueError(f"there is no layer {index} among {len(twin.layers)}")
        twin.layers[index] = _SkippedLayer()
    return twin


def last_tokens_only(network: Network, count: int) -> Network:
    """The network that reads only the last ``count`` tokens, at their own positions.

    The state of every other position is the final norm of its embedding. Raises ValueError for a
    ``count`` below 1.
    """
    return _reading(network, count, slice(-count, None))


def first_tokens_only(network: Network, count: int) -> Network:
    """As ``last_tokens_only`` with the first tokens, whose states do not depend on later ones."""
    return _reading(network, count, slice(0, count))


def _reading(network: Network, count: int, places: slice) -> Network:
    if count < 1:
        raise ValueError(f"count: {count} is below 1")
    return replace(network, decoder=_SomeTokens(network.decoder, places))


def with_matrices(
    network: Network, change: Callable[[Tensor], Tensor], layers: Collection[int] | None = None
) -> Network:
    """The network with every weight matrix of its ``layers`` replaced by ``change`` of it.

    ``change`` gets [..., out, in] (experts of a mixture come stacked) and gives the same shape;
    norms and biases stay. ``layers`` are indices, None for all. A forward makes the matrices of a
    layer when it reaches it, and drops them behind it: those of one layer are in memory at a time.
    """
    return _changing(network, lambda _: change, layers)


def with_random_matrices(
    network: Network, change: Callable[[torch.Generator], Callable[[Tensor], Tensor]]
) -> Network:
    """As ``with_matrices``; ``change`` draws from a generator that each matrix has of its own.

    Its numbers are the same in every forward.
    """
    return _changing(network, lambda seed: change(torch.Generator().manual_seed(seed)), None)


def with_redrawn_matrices(network: Network) -> Network:
    """The network with every matrix drawn at random, the same numbers in every call.

    Each keeps its mean and deviation, so it is like a model of this shape with other training.
    """
    return with_random_matrices(
        network, lambda generator: in_dtype(partial(redrawn, generator=generator))
    )


def with_activations(network: Network, rounding: Rounding) -> Network:
    """The network whose layers round what goes into their matrices, token by token."""
    twin = copied(network)
    for module in twin.layers.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(partial(_rounded_input, in_dtype(rounding)))
    return twin


def with_cache(network: Network, rounding: Rounding) -> Network:
    """The network whose attention reads rounded keys and values, as from a smaller KV cache."""
    return replace(network, decoder=_WithCache(network.decoder, in_dtype(rounding)))


def with_int8_attention(network: Network) -> Network:
    """The network whose attention multiplies 8-bit queries, keys and values, scaled by token."""
    # transformers finds an attention by its name, in a register of its own.
    AttentionInterface.register(_INT8, _int8_attention)
    AttentionMaskInterface.register(_INT8, sdpa_mask)
    twin = copied(network)
    cast("PreTrainedModel", twin.decoder).set_attn_implementation(_INT8)
    return twin


def in_dtype(rounding: Rounding) -> Callable[[Tensor], Tensor]:
    """``rounding`` of values of any float dtype, in that dtype."""
    return lambda values: rounding(values.float()).to(values.dtype)


def pruned(values: Tensor) -> Tensor:
    """``values`` with the two smaller of every four magnitudes set to zero (2:4 sparsity)."""
    groups = values.reshape(*values.shape[:-1], -1, 4)
    kept = groups.abs().topk(2, dim=-1).indices
    zeros = torch.zeros_like(groups)
    return zeros.scatter(-1, kept, groups.gather(-1, kept)).view(values.shape)


def of_rank(values: Tensor, share: float) -> Tensor:
    """The nearest matrices whose rank is ``share`` of the full one."""
    u, sizes, v = torch.linalg.svd(values, full_matrices=False)
    rank = max(1, round(share * sizes.shape[-1]))
    made: Tensor = (u[..., :rank] * sizes[..., None, :rank]) @ v[..., :rank, :]
    return made


def share_of_rank(network: Network, share: float) -> float:
    """The multiplications of the layers' matrices, factored by ``of_rank``, over those of now."""
    matrices = [w for w in network.layers.parameters() if w.ndim >= 2]
    whole = sum(weight.numel() for weight in matrices)
    factored = 0
    for weight in matrices:
        out, length = weight.shape[-2:]
        rank = max(1, round(share * min(out, length)))
        factored += min(weight.numel(), weight.numel() // (out * length) * rank * (out + length))
    return factored / whole


def copied(network: Network) -> Network:
    """The network with modules of its own, which share all weights."""
    shared = {id(weight): weight for weight in network.decoder.parameters()}
    return replace(network, decoder=copy.deepcopy(network.decoder, shared))


def _rounded_input(
    rounded: Callable[[Tensor], Tensor], _module: nn.Module, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    return (rounded(args[0]), *args[1:])


def _int8_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Any:
    rounded = in_dtype(integers(8))
    inputs = (rounded(each) for each in (query, key, value))
    return sdpa_attention_forward(module, *inputs, *args, **options)


def _changing(
    network: Network,
    change_of: Callable[[int], Callable[[Tensor], Tensor]],
    layers: Collection[int] | None,
) -> Network:
    """``change_of`` gets the place of a matrix, counted from 0 through all layers."""
    twin, place = copied(network), 0
    for index, layer in enumerate(twin.layers):
        found = [
            (module, name)
            for module in layer.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.ndim >= 2
        ]
        if layers is None or index in layers:
            for module, name in found:
                # One of its own, whose numbers can change while the published ones stay.
                own = nn.Parameter(module.get_parameter(name).detach(), requires_grad=False)
                setattr(module, name, own)
            matrices = _ChangedMatrices(found, place, change_of)
            layer.register_forward_pre_hook(matrices.make)
            # In front: of two changes the later one is undone first.
            layer.register_forward_hook(matrices.drop, prepend=True, always_call=True)
        place += len(found)
    return twin


class _ChangedMatrices:
    """The matrices of one layer, by module and name, while a forward is in it.

    ``change_of`` gets a place in the whole network; the first matrix here is at ``place``.
    """

    def __init__(
        self,
        matrices: Sequence[tuple[nn.Module, str]],
        place: int,
        change_of: Callable[[int], Callable[[Tensor], Tensor]],
    ) -> None:
        self._matrices = matrices
        self._place = place
        self._change_of = change_of
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    # Parameters cannot take tensors that were made in inference mode.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def make(self, *_: Any) -> None:
        for place, (module, name) in enumerate(self._matrices, self._place):
            weight = module.get_parameter(name)
            self._before.append((weight, weight.data))
            weight.data = self._change_of(place)(weight.data).to(weight.dtype)

    def drop(self, *_: Any) -> None:
        for weight, data in self._before:
            weight.data = data
        self._before = []


class _SkippedLayer(nn.Module):
    """Returns its input. It replaces a layer, so that the other layers keep their indices."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states


class _RoundedCache(DynamicCache):  # type: ignore[misc]
    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._rounded = rounded

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        rounded = self._rounded
        return super().update(rounded(key_states), rounded(value_states), *args, **options)


class _WithCache(nn.Module):
    def __init__(self, decoder: nn.Module, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._decoder = decoder
        self._rounded = rounded
        self.layers = decoder.layers

    def forward(self, **options: Any) -> Any:
        cache = _RoundedCache(self._rounded)
        return self._decoder(**{**options, "past_key_values": cache, "use_cache": True})


class _SomeTokens(nn.Module):
    def __init__(self, decoder: nn.Module, places: slice) -> None:
        super().__init__()
        self._decoder = decoder
        self._places = places
        self.layers = decoder.layers

    def forward(self, use_cache: bool, **inputs: Tensor) -> Any:
        decoder: Any = self._decoder
        ((name, read),) = inputs.items()
        positions = torch.arange(read.shape[1], device=read.device)[self._places]
        options = {name: read[:, self._places], "position_ids": positions.expand(len(read), -1)}
        output = decoder(**options, use_cache=use_cache)
        states = decoder.norm(read if read.is_floating_point() else decoder.embed_tokens(read))
        states[:, self._places] = output.last_hidden_state
        output.last_hidden_state = states
        return output
