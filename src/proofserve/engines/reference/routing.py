"""Which experts a mixture uses: kept from one forward, and held in the forward of other weights.

A token whose experts score nearly alike changes one of them whatever pushed its scores, be it
rounding or changed weights. Honest errors then point to where a suspect's weights move the result,
unless the suspect is computed with the experts of the published weights. What is held are the ids;
the weights of the mix are the suspect's own scores at these ids, by the model's own rule.

A router is a module that gives, in some order, logits [tokens, experts], the weights of the mix and
the ids of the chosen experts, both [tokens, k]; read in transformers 5.19.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network

# How a router weighs experts: of itself, its logits [tokens, experts] and ids [tokens, k].
Rule = Callable[[Any, Tensor, Tensor], Tensor]


def _softmax_over_all(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """Probabilities among all experts, of which the chosen ones add up to 1 in most models."""
    chosen = torch.softmax(logits.float(), dim=-1).gather(-1, ids)
    # Routers without a choice renormalise.
    return _shares(chosen) if getattr(router, "norm_topk_prob", True) else chosen


def _scaled_softmax(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = torch.softmax(logits.float(), dim=-1).gather(-1, ids)
    return chosen * float(router.routed_scaling_factor)


def _softmax_of_large_shares(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = torch.softmax(logits.float(), dim=-1).gather(-1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)


def _softmax_over_chosen(_router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return torch.softmax(logits.gather(-1, ids), dim=-1)


def _sigmoid(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    """A score for each expert alone. Biases and groups choose experts, and do not weigh them."""
    chosen = logits.float().sigmoid().gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):
        chosen = _shares(chosen)
    return chosen * float(getattr(router, "routed_scaling_factor", 1.0))


def _shares(chosen: Tensor) -> Tensor:
    # The models' own guard against a division by zero; otherwise too small to round anything.
    return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)


@dataclass(frozen=True, slots=True)
class Family:
    """Routers of one form; the places are those in the tuple that such a router returns."""

    rule: Rule
    logits: int = 0
    weights: int = 1
    ids: int = 2


_SOFTMAX: Final = Family(_softmax_over_all)
_SIGMOID: Final = Family(_sigmoid)

# By the name of the router's class. A router belongs here once a test has held its experts: that a
# class looks like another does not show that its layer uses what it returns.
FAMILIES: Final[Mapping[str, Family]] = {
    "Qwen3MoeTopKRouter": _SOFTMAX,
    "Qwen2MoeTopKRouter": _SOFTMAX,
    "Qwen3NextTopKRouter": _SOFTMAX,
    "OlmoeTopKRouter": _SOFTMAX,
    "FlexOlmoTopKRouter": _SOFTMAX,
    "MixtralTopKRouter": _SOFTMAX,
    "MiniMaxTopKRouter": _SOFTMAX,
    "HunYuanMoEV1Gate": _SOFTMAX,
    "DeepseekV3TopkRouter": _SIGMOID,
    "Glm4MoeTopkRouter": _SIGMOID,
    "Glm4MoeLiteTopkRouter": _SIGMOID,
    "Dots1TopkRouter": _SIGMOID,
    "MiniMaxM2TopKRouter": _SIGMOID,
    "DeepseekV2TopkRouter": Family(_scaled_softmax),
    "Ernie4_5_MoeTopKRouter": Family(_softmax_of_large_shares),
    "GptOssTopKRouter": Family(_softmax_over_chosen),
    "GraniteMoeTopKRouter": Family(_softmax_over_chosen, logits=2, weights=1, ids=0),
}

# The fields of configurations that say how many experts a layer has.
_NUMBERS_OF_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Router:
    """A router of ``experts`` experts, in the layer of index ``layer``."""

    module: nn.Module
    layer: int
    experts: int

    @property
    def place(self) -> tuple[int, int]:
        return self.layer, self.experts

    def with_ids(self, output: tuple[Tensor, ...], ids: Tensor) -> tuple[Tensor, ...]:
        """``output`` with the experts ``ids`` [tokens, k], weighed by the logits in it."""
        family = FAMILIES[type(self.module).__name__]
        changed = list(output)
        weights = family.rule(self.module, output[family.logits], ids)
        changed[family.weights] = weights.to(output[family.weights].dtype)
        changed[family.ids] = ids
        return tuple(changed)


# Decides for one forward: the router's place in ``routers_of`` and the ids that it chose, int64
# [n, positions, k], give the ids to use.
Choice = Callable[[int, Tensor], Tensor]


def routers_of(network: Network) -> tuple[Router, ...]:
    """The routers in the order of the layers; none of a dense network.

    Raises CheckpointError if a layer mixes experts by a router that is not in ``FAMILIES``.
    """
    found: list[Router] = []
    for index, layer in enumerate(network.layers):
        known = [each for each in layer.modules() if type(each).__name__ in FAMILIES]
        stacks = [path for path, each in layer.named_modules() if _has_stacked_experts(each)]
        if len(known) < len(stacks):
            raise _unknown(_name_of_router(layer, stacks))
        found += [Router(each, index, int(each.num_experts)) for each in known]  # type: ignore[arg-type]
    if not found and _configured_experts(network) > 1:
        raise _unknown(type(network.decoder).__name__)
    return tuple(found)


def _has_stacked_experts(module: nn.Module) -> bool:
    """Whether ``module`` itself holds matrices [experts, ., .]."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return False
    own = module.parameters(recurse=False)
    return any(weight.ndim >= 3 and weight.shape[0] > 1 for weight in own)


def _configured_experts(network: Network) -> int:
    config = getattr(network.decoder, "config", None)
    return max(int(getattr(config, field, None) or 0) for field in _NUMBERS_OF_EXPERTS)


def _name_of_router(layer: nn.Module, stacks: list[str]) -> str:
    """The class that seems to be the router beside these experts, or the one that holds both."""
    blocks = [layer.get_submodule(path.rpartition(".")[0]) for path in stacks]
    names = [type(child).__name__ for block in blocks for child in block.children()]
    unknown = (n for n in names if n.lower().endswith(("router", "gate")) and n not in FAMILIES)
    return next(unknown, type(blocks[0]).__name__)


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"the direction test does not know how {name} weighs experts, so it cannot compute a"
        " suspect with the experts of the published weights; choose other tests"
    )


@contextmanager
def choosing(
    network: Network, routers: tuple[Router, ...], begin: Callable[[Tensor], Choice]
) -> Iterator[None]:
    """While this is open, a ``Choice`` decides the experts of every forward of ``network``.

    ``begin`` makes it of what the network reads, embeddings [n, seq_len, hidden] or ids
    [n, seq_len]. A forward raises CheckpointError if a layer does not ask its router.
    """
    forward = _Forward(begin)
    with ExitStack() as hooks:
        hooks.enter_context(
            network.decoder.register_forward_pre_hook(forward.begun, with_kwargs=True)
        )
        for index, router in enumerate(routers):
            hook = forward.of_router(index, router)
            hooks.enter_context(router.module.register_forward_hook(hook))
        hooks.enter_context(network.decoder.register_forward_hook(forward.ended(routers)))
        yield


class _Forward:
    """The forward that runs: how many sequences it has, and which routers it has asked."""

    def __init__(self, begin: Callable[[Tensor], Choice]) -> None:
        self._begin = begin
        self._asked: list[int] = []

    def begun(self, _decoder: nn.Module, _args: Any, options: dict[str, Any]) -> None:
        read = options.get("inputs_embeds")
        read = options["input_ids"] if read is None else read
        self._choice, self._sequences = self._begin(read), len(read)
        self._asked = []

    def of_router(self, index: int, router: Router) -> Callable[..., tuple[Tensor, ...]]:
        place = FAMILIES[type(router.module).__name__].ids

        def chosen(_module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> Any:
            self._asked.append(index)
            own = output[place]
            ids = self._choice(index, own.view(self._sequences, -1, own.shape[-1]))
            return router.with_ids(output, ids.view(own.shape))

        return chosen

    def ended(self, routers: tuple[Router, ...]) -> Callable[..., None]:
        def check(*_: Any) -> None:
            if sorted(self._asked) != list(range(len(routers))):
                name = type(routers[0].module).__name__
                raise CheckpointError(
                    f"the direction test cannot hold experts: layers did not ask their {name};"
                    " a kernel chooses the experts itself"
                )

        return check


class ExpertMemory:
    """The experts that ``published`` chose for each sequence that it read while ``recording``.

    A sequence is known by its embeddings or tokens, so it may come in another batch or order. The
    ids take a byte each, or two where a layer has more than 256 experts. Of a dense network
    nothing is recorded or held.
    """

    def __init__(self, published: Network) -> None:
        self._chosen: dict[tuple[bytes, int], NDArray[np.unsignedinteger[Any]]] = {}
        self._published = published
        self._routers: tuple[Router, ...] = ()
        self._obstacle: CheckpointError | None = None
        try:
            self._routers = routers_of(published)
        except CheckpointError as error:
            # Only predictions need the experts: all else can be computed without.
            self._obstacle = error

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this is open, forwards of the published network are remembered."""
        if not self._routers:
            yield
            return
        with choosing(self._published, self._routers, self._record):
            yield

    @contextmanager
    def holding(self, suspect: Network) -> Iterator[None]:
        """While this is open, forwards of ``suspect`` use the experts of the published network.

        ``suspect`` may share modules with it. Raises CheckpointError if a router is unknown, or if
        the two have other layers or numbers of experts. Sequences that were not recorded, such as
        those of padding nonces, route by themselves, and their states are no numbers. A forward
        over nothing else raises ValueError.
        """
        if self._obstacle:
            raise self._obstacle
        if not self._routers:
            yield
            return
        routers = routers_of(suspect)
        if [each.place for each in routers] != [each.place for each in self._routers]:
            raise CheckpointError(
                f"the direction test cannot hold experts: the suspect mixes {_layout(routers)},"
                f" the published checkpoint {_layout(self._routers)}"
            )
        held = _Held(self._chosen)
        with (
            choosing(suspect, routers, held.begin),
            suspect.decoder.register_forward_hook(held.spoil_unknown),
        ):
            yield

    def _record(self, read: Tensor) -> Choice:
        rows = _digests(read)

        def record(router: int, ids: Tensor) -> Tensor:
            small = np.uint8 if ids.max() < 256 else np.uint16
            for row, used in zip(rows, ids.cpu().numpy().astype(small), strict=True):
                # A copy, or one sequence would keep those of its whole batch in memory.
                self._chosen[row, router] = used.copy()
            return ids

        return record


class _Held:
    """Forwards by the experts in ``chosen``, by digest of the sequence and place of the router."""

    def __init__(
        self, chosen: Mapping[tuple[bytes, int], NDArray[np.unsignedinteger[Any]]]
    ) -> None:
        self._chosen = chosen
        self._unknown: list[int] = []

    def begin(self, read: Tensor) -> Choice:
        rows = _digests(read)
        known = [place for place, row in enumerate(rows) if (row, 0) in self._chosen]
        self._unknown = [place for place in range(len(rows)) if place not in known]
        if not known:
            raise ValueError("the published network has not read this sequence before")

        def held(router: int, ids: Tensor) -> Tensor:
            kept = np.stack([self._chosen[rows[place], router] for place in known])
            used = ids.clone()
            used[known] = torch.from_numpy(kept.astype(np.int64)).to(ids.device)
            return used

        return held

    def spoil_unknown(self, _decoder: nn.Module, _args: Any, output: Any) -> None:
        # Nobody may take a vector with other experts for a prediction.
        if self._unknown:
            output.last_hidden_state[self._unknown] = float("nan")


def _layout(routers: tuple[Router, ...]) -> str:
    return f"{max((r.experts for r in routers), default=0)} experts in {len(routers)} layers"


def _digests(read: Tensor) -> list[bytes]:
    """One digest for each row of ``read``, of its bytes."""
    raw = read.contiguous().cpu().view(torch.uint8).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw]
