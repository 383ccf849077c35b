"""Mixtures of experts: the routers that are known, and who chooses the experts of a forward.

A router is a module that gives, in some order, logits [tokens, experts], the weights of the mix and
the ids of the chosen experts, both [tokens, k]; read in transformers 5.19. The ids may be the
block's, or kept from one forward and held in another one's; the weights of the mix are then the
network's own scores at these ids, by the model's own rule.

A token whose experts score nearly alike changes one of them whatever pushed its scores, be it
rounding or changed weights. So honest errors point to where a suspect's weights move the result,
unless the suspect is computed with the experts of the published weights.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from proofserve.engines import CheckpointError
from proofserve.engines.reference.network import Network
from proofserve.protocol.scheme import BlockScheme, ExpertLayer

# How a router weighs experts: of itself, its logits [tokens, experts] and ids [tokens, k].
Rule = Callable[[Any, Tensor, Tensor], Tensor]
# What it prefers: of itself, its logits and what its layer hands it beside the states, a number for
# each expert [tokens, experts]; the experts with the largest are chosen.
Preference = Callable[..., Tensor]


def _weighing_by(score: Callable[[Tensor], Tensor], *, sum_is_one: bool = True) -> Rule:
    """The ``score`` of each expert; those of the chosen ones add up to 1 in most models, scaled.

    Biases and groups choose experts, and do not weigh them.
    """

    def rule(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
        chosen = score(logits.float()).gather(-1, ids)
        # Routers without a choice renormalise.
        if sum_is_one and getattr(router, "norm_topk_prob", True):
            # The models' own guard against a division by zero; too small to round anything else.
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen * float(getattr(router, "routed_scaling_factor", 1.0))

    return rule


def _softmax_of_large_shares(router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    chosen = logits.float().softmax(-1).gather(-1, ids)
    return chosen / chosen.sum(dim=-1, keepdim=True).clamp(min=router.norm_min)


def _softmax_over_chosen(_router: Any, logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids).softmax(-1)


def _corrected_sigmoid(router: Any, logits: Tensor, correction: Tensor | None = None) -> Tensor:
    """MiniMax-M2's layer hands the correction to its router, others' routers have it."""
    added = router.e_score_correction_bias if correction is None else correction
    return logits.float().sigmoid() + added


def _corrected_softmax(router: Any, logits: Tensor) -> Tensor:
    scores: Tensor = router.moe_statics(logits.float().softmax(-1))
    return scores


@dataclass(frozen=True, slots=True)
class Family:
    """Routers of one form; the places are those in the tuple that such a router returns.

    Where a router is limited to groups of experts, it prefers those whose ``leaders`` best experts
    have the largest sum.
    """

    rule: Rule
    logits: int = 0
    weights: int = 1
    ids: int = 2
    preference: Preference = lambda _router, logits: logits
    leaders: int = 2


_softmax = partial(torch.softmax, dim=-1)
_SOFTMAX: Final = Family(_weighing_by(_softmax))
_SIGMOID: Final = Family(_weighing_by(torch.sigmoid), preference=_corrected_sigmoid)

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
    "DeepseekV2TopkRouter": Family(_weighing_by(_softmax, sum_is_one=False), leaders=1),
    "Ernie4_5_MoeTopKRouter": Family(_softmax_of_large_shares, preference=_corrected_softmax),
    "GptOssTopKRouter": Family(_softmax_over_chosen),
    "GraniteMoeTopKRouter": Family(_softmax_over_chosen, logits=2, weights=1, ids=0),
}


@dataclass(frozen=True, slots=True)
class Router:
    """A router of ``experts`` experts, in the layer of index ``layer``."""

    module: nn.Module
    layer: int
    experts: int

    @property
    def groups(self) -> int:
        return int(getattr(self.module, "num_group", None) or 1)

    def choosing(self, chosen: int) -> ExpertLayer:
        """What may be chosen where a token has ``chosen`` experts."""
        of_them = int(getattr(self.module, "topk_group", None) or self.groups)
        return ExpertLayer(self.experts, chosen, self.groups, of_them)

    @property
    def family(self) -> Family:
        return FAMILIES[type(self.module).__name__]

    def among(
        self, left: Tensor, output: tuple[Tensor, ...], handed: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """``output`` as if only the experts ``left``, bool [experts], were there; its logits stay.

        ``handed`` is what the layer handed to the router beside the states.
        """
        family = self.family
        logits, chosen = output[family.logits], output[family.ids].shape[-1]
        scores = family.preference(self.module, logits, *handed).masked_fill(~left, -torch.inf)
        layer = self.choosing(chosen)
        grouped = scores.view(len(scores), layer.groups, layer.group_size)
        best = grouped.topk(min(family.leaders, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        preferred = best.topk(layer.chosen_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, preferred, value=False)
        limited = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
        ids = limited.topk(chosen, dim=-1).indices
        return self.with_ids(output, ids, logits.masked_fill(~left, -torch.inf))

    def with_ids(
        self, output: tuple[Tensor, ...], ids: Tensor, logits: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """``output`` with the experts ``ids`` [tokens, k], weighed by ``logits`` or those in it."""
        family = self.family
        changed = list(output)
        weights = family.rule(self.module, output[family.logits] if logits is None else logits, ids)
        changed[family.weights] = weights.to(output[family.weights].dtype)
        changed[family.ids] = ids
        return tuple(changed)


def routers_of(network: Network) -> tuple[Router, ...]:
    """The published network's routers in the order of the layers, without weights.

    None of a dense network. Raises CheckpointError as ``routers_in``.
    """
    layers = enumerate(network.shapes)
    found = tuple(router for index, layer in layers for router in routers_in(index, layer))
    fields = ("num_experts", "num_local_experts", "n_routed_experts")
    numbers = (getattr(network.config, field, None) for field in fields)
    # Some families list a number for each layer.
    configured = max((max(n) if isinstance(n, list) else n for n in numbers if n), default=0)
    if not found and configured > 1:
        raise _unknown(type(network.checkpoint.decoder).__name__)
    return found


def routers_in(index: int, layer: nn.Module) -> list[Router]:
    """The routers of one layer.

    Raises CheckpointError if it mixes experts by a router that is not in ``FAMILIES``.
    """
    known = [each for each in layer.modules() if type(each).__name__ in FAMILIES]
    stacks = [path for path, each in layer.named_modules() if has_stacked_experts(each)]
    if len(known) < len(stacks):
        # The class that seems to be the router beside these experts, or the one that holds both.
        blocks = [layer.get_submodule(path.rpartition(".")[0]) for path in stacks]
        names = [type(child).__name__ for block in blocks for child in block.children()]
        others = (n for n in names if n.lower().endswith(("router", "gate")) and n not in FAMILIES)
        raise _unknown(next(others, type(blocks[0]).__name__))
    return [Router(each, index, int(each.num_experts)) for each in known]  # type: ignore[arg-type]


def has_stacked_experts(module: nn.Module) -> bool:
    """Whether ``module`` itself holds matrices [experts, ., .]."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return False
    own = module.parameters(recurse=False)
    return any(weight.ndim >= 3 and weight.shape[0] > 1 for weight in own)


def _unknown(name: str) -> CheckpointError:
    return CheckpointError(
        f"it is not known how {name} weighs experts, so nothing can be computed with experts that"
        " others chose: neither the direction test, which holds those of the published weights, nor"
        " sketch-v2, of which the block chooses them"
    )


# -- who chooses -----------------------------------------------------------------------------------

# Decides for one batch: a router and the ids that it chose, int64 [n, positions, k], give the ids
# to use.
Choice = Callable[[Router, Tensor], Tensor]
# Makes it of what the network reads, embeddings [n, seq_len, hidden] or ids [n, seq_len].
ChoiceOfExperts = Callable[[Tensor], Choice]


@contextmanager
def choosing(index: int, layer: nn.Module, choice: Choice | None, sequences: int) -> Iterator[None]:
    """While this is open, ``choice`` decides the experts of one forward of a layer.

    None leaves them to the routers. Raises CheckpointError for a router that is unknown, and if the
    layer does not ask it.
    """
    routers = routers_in(index, layer) if choice else []
    asked: list[Router] = []

    def chosen(router: Router, _module: nn.Module, _args: Any, output: tuple[Tensor, ...]) -> Any:
        asked.append(router)
        own = output[router.family.ids]
        ids = choice(router, own.view(sequences, -1, own.shape[-1])) if choice else own
        return router.with_ids(output, ids.view(own.shape))

    with ExitStack() as hooks:
        for each in routers:
            # Before an emulation leaves the router: no kernel rounds what the scheme weighs.
            hook = each.module.register_forward_hook(partial(chosen, each), prepend=True)
            hooks.enter_context(hook)
        yield
    # An emulation may compute a mixture once for each rank.
    if list(dict.fromkeys(asked)) != routers:
        name = type(routers[0].module).__name__
        raise CheckpointError(
            f"experts cannot be chosen for this model: layers did not ask their {name};"
            " a kernel chooses the experts itself"
        )


def seeded_experts(network: Network, block: BlockScheme, seq_len: int) -> ChoiceOfExperts | None:
    """The experts that ``block`` chooses in forwards of ``seq_len`` positions.

    A forward of the first positions alone, by a node that leaves out the others, has theirs. None
    for a scheme that leaves them to the routers, and for a dense network. Raises CheckpointError
    for a router that is unknown.
    """
    if not block.chooses_experts or not routers_of(network):
        return None

    def seeded(router: Router, ids: Tensor) -> Tensor:
        chosen = block.experts(router.layer, router.choosing(ids.shape[-1]), seq_len)
        return chosen[: ids.shape[1]].to(ids.dtype).expand_as(ids).contiguous()

    return lambda _read: seeded


class ExpertMemory:
    """The experts that ``published`` chose for each sequence that it read while ``recording``.

    A sequence is known by its embeddings or tokens, so it may come in another batch or order. The
    ids take a byte each, or two where a layer has more than 256 experts. Of a dense network
    nothing is recorded or held.
    """

    def __init__(self, published: Network) -> None:
        self._chosen: dict[tuple[bytes, int], NDArray[np.unsignedinteger[Any]]] = {}
        self._routers: tuple[Router, ...] = ()
        self._obstacle: CheckpointError | None = None
        try:
            self._routers = routers_of(published)
        except CheckpointError as error:
            # Only predictions need the experts: all else can be computed without.
            self._obstacle = error

    @property
    def is_dense(self) -> bool:
        """Whether the network is known to mix no experts."""
        return not self._routers and self._obstacle is None

    def recording(self) -> ChoiceOfExperts | None:
        """For forwards of the published network, whose experts stay and are remembered."""
        return (lambda read: partial(self._record, _digests(read))) if self._routers else None

    def holding(self, suspect: Network) -> ChoiceOfExperts | None:
        """For forwards of ``suspect``, which then use the experts of the published network.

        Raises CheckpointError if a router is unknown, or if the two have other layers or numbers of
        experts. A forward over a sequence that was not recorded raises ValueError.
        """
        if self._obstacle:
            raise self._obstacle
        if not self._routers:
            return None
        routers = routers_of(suspect)
        if [(r.layer, r.experts) for r in routers] != [(r.layer, r.experts) for r in self._routers]:
            raise CheckpointError(
                f"the direction test cannot hold experts: the suspect mixes {_layout(routers)},"
                f" the published checkpoint {_layout(self._routers)}"
            )
        return lambda read: partial(self._hold, _digests(read))

    def _record(self, rows: Sequence[bytes], router: Router, ids: Tensor) -> Tensor:
        small = np.uint8 if ids.max() < 256 else np.uint16
        for row, used in zip(rows, ids.cpu().numpy().astype(small), strict=True):
            # A copy, or one sequence would keep those of its whole batch in memory.
            self._chosen[row, router.layer] = used.copy()
        return ids

    def _hold(self, rows: Sequence[bytes], router: Router, ids: Tensor) -> Tensor:
        try:
            kept = np.stack([self._chosen[row, router.layer] for row in rows])
        except KeyError:
            raise ValueError("the published network has not read this sequence before") from None
        return torch.from_numpy(kept.astype(np.int64)).to(ids)


def _layout(routers: tuple[Router, ...]) -> str:
    return f"{max((r.experts for r in routers), default=0)} experts in {len(routers)} layers"


def _digests(read: Tensor) -> list[bytes]:
    """One digest for each row of ``read``, of its bytes."""
    raw = read.contiguous().cpu().view(torch.uint8).flatten(1).numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw]
