"""How published checkpoints store their matrices: which tensors belong together, and their format.

Numbers of few bits and their scales become one matrix in float32, under the name and in the layout
that the unquantised checkpoint has (``rounding`` knows the numbers). What is not understood is
refused (ADR 47).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from proofserve.engines import CheckpointError
from proofserve.engines.checkpoints import CheckpointFiles
from proofserve.engines.reference.rounding import (
    Block,
    EightBitKind,
    EightBits,
    Parts,
    from_awq,
    from_bytes,
    from_gptq,
    from_mxfp4,
    from_packed_integers,
)

Settings = Mapping[str, Any]

# In the names of safetensors. Nothing but quantised numbers and their scales is stored so.
_FEW_BITS: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "F4"})
# Scales of a cache in fp8, in the names that vLLM's ``maybe_remap_kv_scale_name`` knows.
_CACHE_SCALE: Final = re.compile(
    r"\.layers\.(\d+)\.(?:.*\.)?(?:([kv])_scale|([kv])_proj\.output_scale)$"
)
# Ends of names that some format gives to parts of a matrix.
_PART: Final = re.compile(
    r"(^|\.)(weight_(packed|scale|scale_inv|shape|zero_point|g_idx|global_scale)"
    r"|input_(scale|zero_point|global_scale)|activation_scale|qweight|qzeros|scales|g_idx)$"
    r"|_(blocks|scales|scale_inv)$"
)


@dataclass(frozen=True, slots=True)
class PublishedMatrix:
    """A matrix in few bits: the names of its ``parts`` by role, and how ``decode`` reads them.

    ``inputs`` says how the published network rounds what it multiplies by the matrix; None for not
    at all. Servers keep ``scales`` in that dtype, whatever the file has; None for as stored.
    """

    parts: Mapping[str, str]
    decode: Callable[[Parts], Tensor]
    bits: int
    inputs: EightBits | None = None
    scales: torch.dtype | None = None


def quantization_of(config: Any) -> Settings | None:
    """What ``config.json`` says of the quantisation; models of images and text have it inside."""
    for each in (config, config.get_text_config()):
        for key in ("quantization_config", "compression_config"):
            if found := getattr(each, key, None):
                return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


class PublishedTensors:
    """What a checkpoint holds: ``plain`` tensors, and ``matrices`` by the names they decode to.

    They are those that the unquantised checkpoint would have; nothing but scales is read yet.
    ``cache`` has, by layer, the stored scales of keys and values, where the checkpoint declares
    that they are kept in fp8; None for a cache in the dtype ``served``, in which servers compute.
    ``declared_bits`` are those of matrices by the configuration alone, 16 if it has no
    quantisation. Raises CheckpointError, with the name, for a method or a layout that is not known
    here.
    """

    def __init__(self, config: Any, files: CheckpointFiles, served: torch.dtype) -> None:
        self.config, self.files, self.served = config, files, served
        self.settings = quantization_of(config) or {}
        self.matrices: Mapping[str, PublishedMatrix] = {}
        self.cache: Mapping[int, Mapping[str, float]] | None = None
        self.declared_bits = 16
        if self.settings:
            method = self.settings.get("quant_method")
            if method not in _METHODS:
                known = ", ".join(_METHODS)
                raise CheckpointError(f"quant_method {method!r} cannot be read; known are {known}")
            self.matrices = dict(_METHODS[method](self))
            self.cache, self.declared_bits = _cache(self), _bits_of(self.settings)
        used = {stored for each in self.matrices.values() for stored in each.parts.values()}
        self.plain = tuple(name for name in files.names if name not in used)
        for name in self.plain:
            if _PART.search(name) or files.dtype(name) in _FEW_BITS:
                stored = f"{name} is stored as {files.dtype(name)}"
                if not self.settings:
                    raise CheckpointError(f"{stored}, and config.json has no quantization_config")
                raise CheckpointError(f"{stored}, and lacks what {method} needs to read it")

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.plain, *self.matrices)

    def stored_as(self, name: str) -> tuple[str, ...]:
        """The tensors of the files that hold ``name`` of ``names``."""
        matrix = self.matrices.get(name)
        return (name,) if matrix is None else tuple(matrix.parts.values())

    @property
    def weight_bits(self) -> int:
        """The most bits that a quantised matrix has, without scales; 16 if there is none.

        Without files they are those that are declared.
        """
        if not self.names:
            return self.declared_bits
        return max((each.bits for each in self.matrices.values()), default=16)

    def read(self, name: str) -> Tensor:
        """A tensor of ``names``: a decoded matrix in float32, or as it is stored.

        Raises CheckpointError if the parts of a matrix do not fit each other.
        """
        if (matrix := self.matrices.get(name)) is None:
            return self.files.read(name)
        parts = {role: self.files.read(stored) for role, stored in matrix.parts.items()}
        if matrix.scales is not None and parts["scale"].is_floating_point():
            parts["scale"] = parts["scale"].to(matrix.scales)
        try:
            return matrix.decode(parts)
        except (ValueError, RuntimeError, IndexError) as error:
            raise CheckpointError(f"{name} cannot be decoded: {error}") from error

    # -- for the formats ---------------------------------------------------------------------------

    def modules(self, end: str) -> Iterator[str]:
        """What comes before ``end`` in the names that end so, less what the settings leave out."""
        for name in self.files.names:
            if name.endswith(end):
                yield self.included(name.removesuffix(end))

    def included(self, module: str) -> str:
        left_out = self.settings.get("modules_to_not_convert") or ()
        left_out = [*left_out, *(self.settings.get("ignored_layers") or ())]
        for each in left_out:
            if _fits(rf"{each}(\.|$)", module) or f".{module}".endswith(f".{each}"):
                raise CheckpointError(
                    f"{module} is quantised in the files, and config.json excludes it by {each!r}"
                )
        return module

    def parts(
        self, module: str, needed: Settings, optional: Settings = MappingProxyType({})
    ) -> dict[str, str]:
        """The names of the parts of ``module`` by role. Raises CheckpointError if one is missing.

        ``needed`` and ``optional`` map roles to ends of names, or to several that mean the same.
        """
        found: dict[str, str] = {}
        for role, ends in {**needed, **optional}.items():
            names = [f"{module}{end}" for end in ([ends] if isinstance(ends, str) else ends)]
            there = [name for name in names if name in self.files.names]
            if len(there) > 1 or (not there and role in needed):
                raise CheckpointError(
                    f"{module} needs one tensor {' or '.join(names)}, and has {len(there)}"
                )
            if there:
                found[role] = there[0]
        return found

    def number(self, key: str, *allowed: int) -> int:
        """A setting that is one of ``allowed`` integers, or any if none is given."""
        found = self.settings.get(key)
        if not isinstance(found, int) or (allowed and found not in allowed):
            known = " or ".join(map(str, allowed)) or "an integer"
            raise CheckpointError(f"quantization_config: {key} is {found!r}, not {known}")
        return found

    def require(self, key: str, *allowed: Any) -> Any:
        """A setting that is one of ``allowed``; the first is the default."""
        found = self.settings.get(key, allowed[0])
        if found not in allowed:
            known = " or ".join(repr(each) for each in allowed)
            raise CheckpointError(f"quantization_config: {key} is {found!r}, not {known}")
        return found

    def scale(self, name: str) -> float:
        """One number that a tensor holds."""
        values = self.files.read(name)
        if values.numel() != 1:
            raise CheckpointError(f"{name} has {values.numel()} numbers, where one is understood")
        return float(values.float().item())


def _bits_of(settings: Settings) -> int:
    groups = (settings.get("config_groups") or {}).values()
    said = [each["weights"]["num_bits"] for each in groups if each.get("weights")]
    # Where the settings do not say it.
    usual = {"fp8": 8, "mxfp4": 4, "awq": 4}
    return max(said) if said else int(settings.get("bits") or usual[settings["quant_method"]])


def _fits(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise CheckpointError(f"quantization_config: {pattern!r} is no pattern: {error}") from error


# -- the formats -----------------------------------------------------------------------------------


def _fp8(source: PublishedTensors) -> Iterator[tuple[str, PublishedMatrix]]:
    """float8 e4m3 with scales for blocks, outputs, or the whole matrix.

    DeepSeek, Qwen3 and MiniMax; see transformers, ``integrations/finegrained_fp8.py``.
    """
    source.require("fmt", "e4m3", "float8_e4m3fn", None)
    scheme = source.require("activation_scheme", "dynamic", "static", None)
    powers = source.require("scale_fmt", None, "float", "ue8m0") == "ue8m0"
    block = source.settings.get("weight_block_size")
    if block and not (len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise CheckpointError(f"quantization_config: weight_block_size is {block!r}, not two sizes")
    for name in source.files.names:
        if source.files.dtype(name) != "F8_E4M3":
            continue
        module = source.included(name.removesuffix(".weight"))
        parts = source.parts(name, {"weight": "", "scale": ("_scale_inv", "_scale")})
        inputs = EightBits("fp8", block[1] if block else None, powers_of_two=powers)
        if scheme == "static":
            given = source.parts(module, {"inputs": (".input_scale", ".activation_scale")})
            inputs = EightBits("fp8", scale=source.scale(given["inputs"]))
            parts |= given
        decode = partial(from_bytes, block=(*block,) if block else (1, None))
        yield name, PublishedMatrix(parts, decode, 8, inputs if scheme else None)


def _mxfp4(source: PublishedTensors) -> Iterator[tuple[str, PublishedMatrix]]:
    """The experts of gpt-oss."""
    kind = source.config.get_text_config().model_type
    if kind != "gpt_oss":
        # Another model's experts may not be transposed.
        raise CheckpointError(f"quant_method mxfp4 is known of gpt_oss alone, not of {kind}")
    for name in source.modules("_blocks"):
        parts = source.parts(name, {"weight": "_blocks", "scale": "_scales"})
        yield name, PublishedMatrix(parts, from_mxfp4, 4)


def _compressed(source: PublishedTensors) -> Iterator[tuple[str, PublishedMatrix]]:
    """Matrices of the library compressed-tensors 0.17, as llm-compressor and Kimi publish them."""
    settings = source.settings
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and settings[key].get("format") != "dense":
            raise CheckpointError(f"quantization_config: {key} changes weights in an unknown way")
    modules = chain.from_iterable(map(source.modules, (".weight_packed", ".weight_scale")))
    for module in dict.fromkeys(modules):
        yield f"{module}.weight", _compressed_matrix(module, _group_of(module, settings), source)


def _group_of(module: str, settings: Settings) -> Settings:
    """The group of the settings that says how ``module`` is stored.

    Targets are names, patterns behind "re:", or classes; the more special ones win, as in
    ``utils/match.py`` of the library.
    """

    def named(target: str) -> bool:
        pattern = target.removeprefix("re:")
        return target == module or (pattern != target and _fits(pattern, module))

    if any(named(each) for each in settings.get("ignore") or ()):
        raise CheckpointError(f"{module} is quantised in the files, and config.json ignores it")
    groups = [*(settings.get("config_groups") or {}).values()]
    if not all(isinstance(each, Mapping) and each.get("weights") for each in groups):
        raise CheckpointError("quantization_config: config_groups has a group without weights")
    found = [each for each in groups if any(map(named, each.get("targets") or ()))]
    found = found or [each for each in groups if "Linear" in (each.get("targets") or ())]
    if len(found) != 1:
        raise CheckpointError(f"{module} belongs to {len(found)} of the config_groups, not to one")
    return {"format": settings.get("format"), **{k: v for k, v in found[0].items() if v}}


_COMPRESSED: Final[Mapping[Any, tuple[tuple[str, int], ...]]] = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
}


def _compressed_matrix(module: str, group: Settings, source: PublishedTensors) -> PublishedMatrix:
    weights, layout = group["weights"], group["format"]
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if (kind, bits) not in _COMPRESSED.get(layout, ()):
        raise CheckpointError(f"{module}: format {layout!r} with {kind} {bits} cannot be read")
    if group.get("output_activations"):
        raise CheckpointError(f"{module}: output_activations are not known here")
    needed = {"weight": ".weight", "scale": ".weight_scale"}
    if packed := layout == "pack-quantized":
        needed |= {"weight": ".weight_packed", "shape": ".weight_shape"}
    if not weights.get("symmetric", True):
        needed["zero"] = ".weight_zero_point"
    parts = source.parts(module, needed, {"groups": ".weight_g_idx"})
    expected = "I32" if packed else {"int": "I8", "float": "F8_E4M3"}[kind]
    if (stored := source.files.dtype(parts["weight"])) != expected:
        raise CheckpointError(f"{parts['weight']} is stored as {stored}, not as {expected}")
    inputs = _declared_inputs(module, group.get("input_activations"), source, parts)
    block = _block_of(module, weights)
    if not packed:
        return PublishedMatrix(parts, partial(from_bytes, block=block), bits, inputs)
    decode = partial(from_packed_integers, bits=bits, block=block)
    return PublishedMatrix(parts, decode, bits, inputs, source.served)


def _block_of(module: str, weights: Settings) -> Block:
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group" and isinstance(size, int) and size > 0:
        return 1, size
    if strategy == "block" and weights.get("block_structure"):
        tall, wide = weights["block_structure"]
        return tall, wide
    raise CheckpointError(f"{module}: strategy {strategy!r} of weights cannot be read")


def _declared_inputs(
    module: str, inputs: Settings | None, source: PublishedTensors, parts: dict[str, str]
) -> EightBits | None:
    """What ``input_activations`` declare; static scales are added to ``parts``."""
    if not inputs:
        return None
    kinds: Mapping[Any, EightBitKind] = {("int", 8): "int8", ("float", 8): "fp8"}
    kind = kinds.get((inputs.get("type", "int"), inputs.get("num_bits")))
    strategy, dynamic = inputs.get("strategy"), inputs.get("dynamic", False)
    if kind and inputs.get("symmetric", True):
        if dynamic is True and strategy == "token":
            return EightBits(kind)
        if dynamic is True and strategy == "group" and isinstance(inputs.get("group_size"), int):
            return EightBits(kind, inputs["group_size"])
        if dynamic is False and strategy == "tensor":
            parts |= source.parts(module, {"inputs": ".input_scale"})
            return EightBits(kind, scale=source.scale(parts["inputs"]))
    told = ("type", "num_bits", "strategy", "dynamic", "symmetric")
    said = ", ".join(f"{key} {inputs[key]}" for key in told if key in inputs)
    raise CheckpointError(f"{module}: input_activations cannot be computed: {said}")


def _cache(source: PublishedTensors) -> Mapping[int, Mapping[str, float]] | None:
    """The scales of keys, "k", and values, "v", of each layer that has them; others have 1."""
    scheme = source.settings.get("kv_cache_scheme")
    if not scheme:
        return None
    known = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    wrong = {key: scheme.get(key) for key, value in known.items() if scheme.get(key) != value}
    if wrong or scheme.get("dynamic"):
        raise CheckpointError(f"kv_cache_scheme cannot be computed: {wrong or 'dynamic scales'}")
    if any(".kv_b_proj." in name for name in source.files.names):
        raise CheckpointError("kv_cache_scheme cannot be computed: the cache holds latents of MLA")
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for name in source.files.names:
        if place := _CACHE_SCALE.search(name):
            layer, one, other = place.groups()
            found[int(layer)][one or other] = source.scale(name)
    return found


_QWEIGHT: Final = {"weight": ".qweight", "zero": ".qzeros", "scale": ".scales"}


def _awq(source: PublishedTensors) -> Iterator[tuple[str, PublishedMatrix]]:
    source.number("bits", 4)
    source.require("version", "gemm", "GEMM")
    if source.settings.get("backend") == "llm-awq":
        raise CheckpointError(
            "quantization_config: backend llm-awq stores matrices in another layout"
        )
    size = source.number("group_size")
    for module in source.modules(".qweight"):
        parts = source.parts(module, _QWEIGHT)
        decode = partial(from_awq, size=size)
        yield f"{module}.weight", PublishedMatrix(parts, decode, 4, scales=source.served)


def _gptq(source: PublishedTensors) -> Iterator[tuple[str, PublishedMatrix]]:
    bits, size = source.number("bits", 4, 8), source.number("group_size")
    old = source.require("checkpoint_format", "gptq", "gptq_v2") == "gptq"
    source.require("pack_dtype", "int32", None)
    source.require("is_marlin_format", False, None)
    if any(not rule.startswith("-:") for rule in source.settings.get("dynamic") or ()):
        raise CheckpointError("quantization_config: dynamic gives modules formats of their own")
    order = {"groups": ".g_idx"}
    reorders = source.settings.get("desc_act", False)
    symmetric = bool(source.settings.get("sym", False))
    for module in source.modules(".qweight"):
        parts = source.parts(module, *((_QWEIGHT | order, {}) if reorders else (_QWEIGHT, order)))
        decode = partial(from_gptq, bits=bits, size=size, old=old, symmetric=symmetric)
        yield f"{module}.weight", PublishedMatrix(parts, decode, bits, scales=source.served)


_METHODS: Final[
    Mapping[Any, Callable[[PublishedTensors], Iterator[tuple[str, PublishedMatrix]]]]
] = {"fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed, "awq": _awq, "gptq": _gptq}
