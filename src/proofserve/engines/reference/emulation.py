"""A forward of a float32 decoder as other kernels would compute it.

It finds the points where a ``KernelProfile`` rounds: by module (norms, attention, MLP) and by the
torch functions that transformers calls in them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from proofserve.engines.reference.kernels import KernelProfile, Point
from proofserve.engines.reference.network import IN_EIGHT_BITS


class _Place(StrEnum):
    NOWHERE = "outside the layers"
    LAYER = "in a layer, beside its parts"
    ATTENTION = "in attention"
    MLP = "in an MLP or a mixture of experts"
    EXPERTS = "in the experts of a mixture"
    ROUTER = "in the router of a mixture"
    NORM = "in a norm"
    TABLE = "where cosines and sines are made"
    EMBEDDING = "where tokens become vectors"


# Parts of the names of classes in transformers; the later wins.
_CLASSES: Final[Mapping[str, _Place]] = {
    "Norm": _Place.NORM,
    "Embedding": _Place.EMBEDDING,
    "RotaryEmbedding": _Place.TABLE,
    "Router": _Place.ROUTER,
    "Experts": _Place.EXPERTS,
}

# Within experts, other points stand for those of an MLP.
_IN_EXPERTS: Final[Mapping[Point, Point]] = {
    Point.OUTPUTS: Point.EXPERT_STEPS,
    Point.OUTPUTS_OF_EIGHT_BITS: Point.EXPERT_STEPS,
    Point.ACTIVATION: Point.EXPERT_STEPS,
    Point.PRODUCT: Point.EXPERT_PRODUCT,
}


@contextmanager
def emulated(part: nn.Module, profile: KernelProfile | None, *, is_layer: bool) -> Iterator[None]:
    """Forwards of ``part`` in this context round as ``profile`` says; None changes nothing.

    ``part`` is a layer, or a decoder of which only what is beside its layers is used. The hooks are
    on the modules: no other thread may use ``part`` meanwhile.
    """
    if profile is None:
        yield
        return
    kernels = _Kernels(profile, part)
    with ExitStack() as stack:
        if not is_layer:
            begin = part.register_forward_pre_hook(kernels.begin, with_kwargs=True)
            stack.enter_context(begin)
        places = _places(part, is_layer)
        for module, place in places.items():
            enter, leave = partial(kernels.enter, place), partial(kernels.leave, place)
            stack.enter_context(module.register_forward_pre_hook(enter))
            # First of all hooks: what a scheme does to a layer's output is no kernel's work.
            stack.enter_context(module.register_forward_hook(leave, prepend=True))
            mixes = any(places.get(each) is _Place.EXPERTS for each in module.modules())
            if mixes and place is _Place.MLP and profile.ranks > 1:
                stack.enter_context(kernels.on_ranks(module))
        stack.enter_context(kernels)
        yield


def _places(part: nn.Module, is_layer: bool) -> dict[nn.Module, _Place]:
    found: dict[nn.Module, _Place] = {}
    if is_layer:
        found[part] = _Place.LAYER
        for child in part.children():
            attends = "Attention" in type(child).__name__
            found[child] = _Place.ATTENTION if attends else _Place.MLP
    for module in part.modules():
        for name, place in _CLASSES.items():
            if name in type(module).__name__:
                found[module] = place
    return found


@dataclass(slots=True)
class _Rank:
    """A rank whose part of a mixture is computed. What all ranks compute ``alike`` is kept."""

    number: int
    alike: list[Tensor]
    used: int = 0

    def same(self, compute: Callable[[], Tensor]) -> Tensor:
        """The next product of which each rank has all: the first rank computes it."""
        if self.number == 0:
            self.alike.append(compute())
        self.used += 1
        return self.alike[self.used - 1]


class _Kernels(TorchFunctionMode):
    """Sees every call of a torch function, and knows in which modules it happens."""

    def __init__(self, profile: KernelProfile, part: nn.Module) -> None:
        super().__init__()
        self._profile = profile
        self._stack: list[_Place] = []
        # What the norm of this place reads.
        self._normed: Tensor | None = None
        # Whether positions rotate neighbours rather than halves of a head.
        configs = (getattr(module, "config", None) for module in part.modules())
        self._rotates_pairs = any(getattr(each, "rope_interleave", False) for each in configs)
        # Of MiniMax vLLM has a norm in attention, and a router, of their own.
        self._is_minimax = any("MiniMax" in type(each).__name__ for each in part.modules())
        # The next product of attention is of its weights and the values.
        self._weighing = False
        # The last sigmoid of an activation, and the last weight that a router cast to float32.
        self._sigmoid: Tensor | None = None
        self._exact: Tensor | None = None
        # The matrices whose inputs tensor parallelism splits, in the usual names of transformers:
        # ids of single ones, shapes [out, in] of experts'.
        self._split_weights: set[int] = set()
        self._split_shapes: set[torch.Size] = set()
        # On several ranks: the one whose part of a mixture is computed, and its last product of
        # which it has a part.
        self._rank: _Rank | None = None
        self._part: Tensor | None = None
        # Those of single matrices in 8 bits, and whether experts' are.
        self._eight_bits: set[int] = set()
        self._experts_in_eight_bits = False
        for name, module in part.named_modules():
            stacked = getattr(module, "down_proj", None)
            if getattr(module, IN_EIGHT_BITS, False):
                self._experts_in_eight_bits |= not isinstance(module, nn.Linear)
                self._eight_bits.update(map(id, module.parameters()))
            if isinstance(module, nn.Linear) and name.rpartition(".")[2] in {"o_proj", "down_proj"}:
                self._split_weights.add(id(module.weight))
            elif isinstance(stacked, nn.Parameter):
                one = stacked[0].mT if getattr(module, "is_transposed", False) else stacked[0]
                self._split_shapes.add(one.shape)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(self._place, {}).get(func)
        if callable(handler):
            return handler(self, func, *args, **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        return made if handler is None else self._at(handler, made)

    # -- hooks: where the forward is ---------------------------------------------------------------

    @property
    def _place(self) -> _Place:
        return self._stack[-1] if self._stack else _Place.NOWHERE

    def begin(self, _: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        """Embeddings that a scheme draws are given to a node in the format that it serves."""
        drawn = options.get("inputs_embeds")
        if drawn is not None:
            options = {**options, "inputs_embeds": self._profile.as_served(drawn)}
        return args, options

    def enter(self, place: _Place, _: nn.Module, args: Any) -> Any:
        if place is _Place.LAYER:
            # A scheme may have changed what the layer before gave.
            args = (self._at(Point.RESIDUAL, args[0]), *args[1:])
        self._stack.append(place)
        if place is _Place.NORM:
            self._normed = args[0]
        return args

    def leave(self, place: _Place, _module: nn.Module, _args: Any, out: Any) -> Any:
        self._stack.pop()
        if place is _Place.NORM:
            return self._at(self._norm, out)
        if place is _Place.TABLE:
            return tuple(self._at(Point.TABLE, each) for each in out)
        return out

    @contextmanager
    def on_ranks(self, mixture: nn.Module) -> Iterator[None]:
        """Each rank adds up its parts of all experts, before these sums are added up."""
        plain = mixture.forward

        def forward(*args: Any, **options: Any) -> Any:
            made, alike = [], list[Tensor]()
            for number in range(self._profile.ranks):
                self._rank = _Rank(number, alike)
                made.append(plain(*args, **options))
            self._rank = None
            if isinstance(made[0], Tensor):
                return self._profile.all_reduced(made)
            # Some give what their router says, too.
            return (self._profile.all_reduced([each[0] for each in made]), *made[0][1:])

        mixture.forward = forward
        try:
            yield
        finally:
            del mixture.forward

    @property
    def _norm(self) -> Point:
        return Point.HEAD_NORM if _Place.ATTENTION in self._stack else Point.NORM

    def _at(self, point: Point, values: Tensor) -> Tensor:
        in_experts = self._place is _Place.EXPERTS
        return self._profile.at(_IN_EXPERTS.get(point, point) if in_experts else point, values)

    # -- handlers of torch functions ---------------------------------------------------------------

    def residual(self, func: Any, one: Tensor, other: Tensor) -> Tensor:
        read = (self._at(Point.STORED_RESIDUAL, each) for each in (one, other))
        return self._at(Point.RESIDUAL, func(*read))

    def scaled(self, func: Any, one: Tensor, factor: Tensor) -> Tensor:
        """Gemma multiplies embeddings by a factor that it keeps in the served format."""
        return self._profile.as_served(func(one, self._profile.as_served(factor)))

    def cast(self, func: Any, values: Tensor, *args: Any, **options: Any) -> Tensor:
        """A norm casts its input to float32, and its values back before or after the gain."""
        made: Tensor = func(values, *args, **options)
        is_back = values is not self._normed and Point.GAIN in self._profile.points
        return self._at(self._norm, made) if is_back else made

    def gain(self, func: Any, *factors: Tensor) -> Tensor:
        """Of a norm: normalised values times a parameter. Gemma's is a sum with 1, in float32."""
        rounds_once = self._is_minimax and self._norm is Point.HEAD_NORM
        known = not rounds_once and any(isinstance(each, nn.Parameter) for each in factors)
        read = (self._at(Point.VLLM_GAIN, each) if known else each for each in factors)
        made: Tensor = func(*read)
        return made

    def exact(self, func: Any, *args: Any, **options: Any) -> Tensor:
        """DeepSeek's router multiplies in float32, whatever the served format is."""
        self._exact = func(*args, **options)
        return self._exact

    def linear(self, func: Any, inputs: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
        if weight is self._exact:
            made: Tensor = func(inputs, weight, bias)
            return made
        if self._is_minimax and self._place is _Place.ROUTER:
            return self._at(Point.FLOAT_ROUTER, func(inputs, weight, bias))
        return self._product(inputs, weight, bias)

    def stacked(self, _: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        return self._product(inputs, weight.mT)

    def grouped(
        self, _: Any, inputs: Tensor, weight: Tensor, offs: Tensor, **_options: None
    ) -> Tensor:
        """Rows [rows, in], sorted by expert, times [experts, in, out]; ``offs`` are their ends."""
        ends = offs.tolist()
        rows = zip([0, *ends], ends, weight.mT, strict=False)
        made = torch.cat([self._product(inputs[a:b], each) for a, b, each in rows])
        self._part = None if self._part is None else made
        return made

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        single = isinstance(weight, nn.Parameter)
        split = id(weight) in self._split_weights if single else weight.shape in self._split_shapes
        exact = id(weight) in self._eight_bits if single else self._experts_in_eight_bits
        product = partial(self._profile.product, as_they_are=exact)
        rank, ranks = self._rank, self._profile.ranks
        if rank is None:
            made = product(inputs, weight, bias, split=split)
        elif split:
            rows, columns = (each.tensor_split(ranks, -1)[rank.number] for each in (inputs, weight))
            made = product(rows, columns, None if rank.number else bias)
        else:
            made = rank.same(partial(product, inputs, weight, bias))
        made = self._at(Point.OUTPUTS_OF_EIGHT_BITS if exact else Point.OUTPUTS, made)
        self._part = made if split else None
        return made

    def attention(self, func: Any, *args: Any, **options: Any) -> Tensor:
        return self._profile.attention(func, *args, **options)

    def weights(self, func: Any, *args: Any, **options: Any) -> Tensor:
        self._weighing = True
        return self._at(Point.WEIGHTS, func(*args, **options))

    def attend(self, _: Any, one: Tensor, other: Tensor) -> Tensor:
        """Queries times keys, or weights times values: attention as plain products."""
        weighing, self._weighing = self._weighing, False
        read = self._profile.cached(other)
        if weighing:
            return self._at(Point.ATTENTION, self._profile.matmul(one, read))
        return self._at(Point.SCORES, self._profile.matmul(self._at(Point.OPERANDS, one), read))

    def turn(self, func: Any, one: Tensor, other: Any) -> Tensor:
        """A product in attention: of the rotary embedding, or scores times their scale."""
        rotation = Point.PAIR_ROTATION if self._rotates_pairs else Point.ROTATION
        return self._at(rotation if isinstance(other, Tensor) else Point.SCORES, func(one, other))

    def turned(self, func: Any, one: Tensor, other: Tensor) -> Tensor:
        """A sum in attention: of the rotary embedding, or scores and their mask or maximum."""
        point = Point.ROTATED if one.shape == other.shape else Point.SCORES
        return self._at(point, func(one, other))

    def sigmoid(self, func: Any, values: Tensor) -> Tensor:
        """GPT-OSS writes its SiLU as a product with a sigmoid."""
        self._sigmoid = self._at(Point.ACTIVATION, func(values))
        return self._sigmoid

    def multiply(self, func: Any, one: Tensor, other: Any) -> Tensor:
        """A product in an MLP: with a number, with experts' weights, or of the two halves."""
        if not isinstance(other, Tensor) or other is self._sigmoid:
            return self._at(Point.ACTIVATION, func(one, other))
        if one.shape == other.shape:
            return self._at(Point.PRODUCT, func(one, other))
        return self._at(Point.EXPERT_STEPS, func(one, self._at(Point.EXPERT_STEPS, other)))

    def add(self, func: Any, one: Tensor, other: Any) -> Tensor:
        """A sum in an MLP: with a number, with a bias, or of experts' outputs."""
        if not isinstance(other, Tensor):
            return self._at(Point.ACTIVATION, func(one, other))
        if self._takes_no_bias(one):
            return one
        is_mixture = one.shape == other.shape
        return self._at(Point.MIXTURE if is_mixture else Point.OUTPUTS, func(one, other))

    def add_bias(self, func: Any, one: Tensor, bias: Tensor) -> Tensor:
        if self._takes_no_bias(one):
            return one
        return one.copy_(self._at(Point.OUTPUTS, func(one, bias)))

    def _takes_no_bias(self, part: Tensor) -> bool:
        """Whether ``part`` is the product of a rank beside the first, which alone adds the bias."""
        return part is self._part and self._rank is not None and self._rank.number > 0

    def add_experts(self, func: Any, total: Tensor, *args: Any) -> Tensor:
        return total.copy_(self._at(Point.MIXTURE, func(total, *args)))


# Of a torch function: what does it instead, or the point where its result is rounded.
_Handlers = Mapping[Any, Callable[..., Tensor] | Point]
_MLP: Final[_Handlers] = {
    functional.linear: _Kernels.linear,
    # What functional.grouped_mm calls.
    torch._grouped_mm: _Kernels.grouped,
    functional.silu: Point.ACTIVATION,
    functional.gelu: Point.ACTIVATION,
    torch.sigmoid: _Kernels.sigmoid,
    Tensor.matmul: _Kernels.stacked,
    Tensor.mul: _Kernels.multiply,
    Tensor.add: _Kernels.add,
    Tensor.add_: _Kernels.add_bias,
    Tensor.index_add_: _Kernels.add_experts,
    Tensor.sum: Point.MIXTURE,
}
_HANDLERS: Final[Mapping[_Place, _Handlers]] = {
    _Place.LAYER: {Tensor.add: _Kernels.residual},
    _Place.ATTENTION: {
        functional.linear: _Kernels.linear,
        functional.scaled_dot_product_attention: _Kernels.attention,
        functional.softmax: _Kernels.weights,
        torch.matmul: _Kernels.attend,
        Tensor.mul: _Kernels.turn,
        Tensor.add: _Kernels.turned,
        Tensor.sub: _Kernels.turned,
    },
    _Place.MLP: _MLP,
    _Place.EXPERTS: _MLP,
    _Place.ROUTER: {Tensor.type: _Kernels.exact, functional.linear: _Kernels.linear},
    _Place.NORM: {
        Tensor.to: _Kernels.cast,
        Tensor.type_as: _Kernels.cast,
        Tensor.mul: _Kernels.gain,
    },
    _Place.EMBEDDING: {Tensor.mul: _Kernels.scaled},
}
