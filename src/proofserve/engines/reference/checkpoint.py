"""A checkpoint on disk, whose layers are read one at a time.

The modules are those of transformers, made without memory, and its own loader fills them: so names
and layouts of files are converted as ever (read in transformers 5.19, ``core_model_loading``).
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from proofserve.engines import CheckpointError
from proofserve.engines.checkpoints import CheckpointFiles, named_errors
from proofserve.engines.reference.formats import PublishedTensors
from proofserve.engines.reference.rounding import EightBits

# Layers that take less than this together, in bytes, stay in memory once they were read.
KEPT: Final = 2**27
# The parts of a checkpoint: a layer by its index, or one of these.
_SHELL, _EMBEDDINGS, _HEAD, _UNUSED = "shell", "embeddings", "head", "unused"


class LayeredCheckpoint:
    """The modules of a checkpoint: a decoder without its layers, and each layer when it is needed.

    ``shapes`` are the layers without weights; those of a small one stay in memory once they
    were read, and on a card while half of its memory is free. ``published`` says in what format
    weights are stored, ``inputs`` how matrices round what they multiply: for each layer by the
    parameter's name in it; ``served`` the dtype in which servers compute, None for the usual one.

    Raises CheckpointError if the folder holds no decoder that transformers knows, weights in a
    format that is not understood, or no complete set of files, unless only the shapes are wanted
    and ``needs_weights`` is false.
    """

    def __init__(
        self,
        path: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        served: torch.dtype | None = None,
        *,
        needs_weights: bool = True,
    ) -> None:
        self._path = path
        self._device = device
        with named_errors(path):
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            self.config: Any = config.get_text_config()
            self.declared_dtype: torch.dtype = self.config.dtype or torch.bfloat16
            self.dtype = dtype or self.declared_dtype
            # A checkpoint in float32 is served in 16 bits, unless an operator asks for more.
            is_whole = self.declared_dtype == torch.float32
            self.served_dtype = served or (torch.bfloat16 if is_whole else self.declared_dtype)
            with torch.device("meta"):
                self._model: Any = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
            self._model.eval().requires_grad_(requires_grad=False)
            self._files = CheckpointFiles(path, needed=needs_weights)
            self.published = PublishedTensors(config, self._files, self.served_dtype)
        decoder = self._model.get_decoder()
        if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
            raise CheckpointError(f"{path} holds a {type(decoder).__name__}, which has no layers")
        self.shapes: tuple[nn.Module, ...] = tuple(decoder.layers)
        self._layers: nn.ModuleList = decoder.layers
        self._mapping = get_model_conversion_mapping(self._model)
        names = {id(module): name for name, module in self._model.named_modules()}
        self._head = f"{names[id(self._model.get_output_embeddings())]}."
        self.inputs: dict[int, dict[str, EightBits]] = defaultdict(dict)
        self._parts = self._tensors_by_part(names)
        size = sum(weight.numel() * weight.itemsize for weight in decoder.layers.parameters())
        self.stays_in_memory: bool = size <= KEPT
        self._read: dict[int, nn.Module] = {}

    def layer(self, index: int) -> nn.Module:
        """The layer with its weights; where there is no room for more, the last one is kept alone.

        Raises CheckpointError if its weights are not there or of another shape.
        """
        if index not in self._read:
            if not self._has_room():
                self._read.clear()
            self._read[index] = self._filled_layer(index)
            if not self.stays_in_memory and index + 1 in self._parts:
                self._files.read_ahead(self._stored(index + 1))
        return self._read[index]

    def _has_room(self) -> bool:
        """Whether layers stay beside the next one."""
        if self._device.type != "cuda":
            return self.stays_in_memory
        # To read a layer again takes a card longer than to multiply by it.
        free, total = torch.cuda.mem_get_info(self._device)
        return 2 * free > total

    def stored_bytes(self, index: int) -> int:
        """What a layer takes in the files, or by its configuration where there are none."""
        if not self._files.names:
            quantised = self.published.declared_bits < 16
            bits = self.published.declared_bits if quantised else 8 * self.declared_dtype.itemsize
            return sum(each.numel() for each in self.shapes[index].parameters()) * bits // 8
        return sum(len(self._files.places[each][1]) for each in self._stored(index))

    def _stored(self, index: int) -> list[str]:
        """The names of a layer's tensors in the files."""
        return [each for name in self._parts[index] for each in self.published.stored_as(name)]

    def of_one_layer(self) -> "LayeredCheckpoint":
        """The first layer alone, with random weights: as quick as the published one.

        It reads embeddings, and needs no files.
        """
        made, model = copy.copy(self), copy.deepcopy(self._model)
        made.shapes, made.stays_in_memory = self.shapes[:1], True
        made.decoder, layer = model.get_decoder(), copy.deepcopy(self.shapes[0])
        made.decoder.layers = nn.ModuleList([StandIn(self.shapes[0])])
        embeddings = made.decoder.get_input_embeddings()
        for module in chain(made.decoder.modules(), layer.modules()):
            for name, weight in [*module.named_parameters(recurse=False)]:
                if module is not embeddings:
                    drawn = torch.empty_like(weight, device=self._device)
                    drawn.normal_(std=weight.shape[-1] ** -0.5)
                    setattr(module, name, nn.Parameter(drawn, requires_grad=False))
        self._finish(model, made.decoder)
        self._finish(model, layer)
        made._read = {0: layer}
        return made

    @cached_property
    def decoder(self) -> Any:
        """The decoder, whose layers do nothing; embeddings are read as tokens ask for them."""
        model = copy.deepcopy(self._model)
        decoder = model.get_decoder()
        decoder.layers = nn.ModuleList(StandIn(each) for each in self.shapes)
        self._fill(model, self._parts[_SHELL])
        embeddings = decoder.get_input_embeddings()
        self._require("the decoder", decoder, besides=embeddings)
        self._finish(model, decoder)
        # It counts for gradients alone, and would have to be one of the rows that are there.
        embeddings.padding_idx = None
        embeddings.register_forward_pre_hook(partial(_rows_of, self._embeddings(), self.dtype))
        return decoder

    @cached_property
    def head(self) -> Any:
        """The module that turns last hidden states into logits, tied to embeddings or not."""
        model = copy.deepcopy(self._model)
        head = model.get_output_embeddings()
        self._fill(model, self._parts[_HEAD])
        if head.weight.is_meta and f"{self._head}weight" in self._model.all_tied_weights_keys:
            tied = self._embeddings().to(self._device, self.dtype)
            head.weight = nn.Parameter(tied, requires_grad=False)
        self._require("the head", head)
        return head

    def _embeddings(self) -> Tensor:
        if not (stored := self._parts[_EMBEDDINGS]):
            raise CheckpointError(f"{self._path} has no embeddings of tokens")
        if stored[0] in self.published.matrices:
            return self.published.read(stored[0])
        return self._files.mapped(stored[0])

    def _filled_layer(self, index: int) -> nn.Module:
        empty = self._layers[index]
        self._layers[index] = copy.deepcopy(empty)
        try:
            self._fill(self._model, self._parts[index])
            layer = self._layers[index]
        finally:
            self._layers[index] = empty
        self._require(f"layer {index}", layer)
        self._finish(self._model, layer)
        return layer

    def _require(self, name: str, part: nn.Module, besides: nn.Module | None = None) -> None:
        """Raise CheckpointError unless all that a file holds of ``part`` was read."""
        others = {id(weight) for weight in besides.parameters()} if besides else set()
        held = part.state_dict(keep_vars=True).items()
        if missing := [n for n, values in held if values.is_meta and id(values) not in others]:
            raise CheckpointError(f"{self._path}: {name} has no {', '.join(missing[:3])}")

    def _fill(self, model: Any, names: Sequence[str]) -> None:
        read = {name: _Unread(partial(self.published.read, name)) for name in names}
        settings = LoadStateDictConfig(
            device_map={"": self._device},
            dtype=self.dtype,
            dtype_plan=model._get_dtype_plan(self.dtype),
            weight_mapping=self._mapping,
        )
        shows = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with named_errors(self._path):
                found, _ = convert_and_load_state_dict_in_model(model, read, settings)
        finally:
            if shows:
                logging.enable_progress_bar()
        if found.mismatched_keys:
            name, stored, expected = next(iter(found.mismatched_keys))
            raise CheckpointError(
                f"{self._path}: {name} is {list(stored)}, the configuration says {list(expected)}"
            )
        if found.conversion_errors:
            name, why = next(iter(found.conversion_errors.items()))
            raise CheckpointError(f"{self._path}: {name} cannot be converted: {why}")

    def _finish(self, model: Any, part: nn.Module) -> None:
        """Compute what no file holds, such as the frequencies of rotary embeddings."""
        for module in part.modules():
            empty = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
            for name, values in empty.items():
                setattr(module, name, torch.empty_like(values, device=self._device))
            if empty:
                model._init_weights(module)

    def _tensors_by_part(self, names: Mapping[int, str]) -> Mapping[str | int, list[str]]:
        """The names in the files: of each layer, of the decoder beside them, of the head.

        ``names`` are those of modules, by their ids.
        """
        decoder = self._model.get_decoder()
        layers = f"{names[id(decoder.layers)]}."
        beside = {
            f"{names[id(decoder.get_input_embeddings())]}.weight": _EMBEDDINGS,
            self._head: _HEAD,
            f"{names[id(decoder)]}.": _SHELL,
        }
        renamings = [each for each in self._mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        known = self._model.state_dict()
        several = [each for each in converters if len(each.target_patterns) > 1]
        split = {pattern for each in several for pattern in each.source_patterns}
        found: dict[str | int, list[str]] = defaultdict(list)
        for stored in self.published.names:
            name, pattern = rename_source_key(
                stored, renamings, converters, self._model.base_model_prefix, known
            )
            if name.startswith(layers):
                part: str | int = int(name.removeprefix(layers).partition(".")[0])
            else:
                part = next((p for start, p in beside.items() if name.startswith(start)), _UNUSED)
            found[part].append(stored)
            if (matrix := self.published.matrices.get(stored)) and matrix.inputs:
                if pattern in split:
                    raise CheckpointError(f"{stored} is split here, and its inputs are rounded")
                self._declare(part, name.removeprefix(f"{layers}{part}."), matrix.inputs)
        return found

    def _declare(self, part: str | int, name: str, inputs: EightBits) -> None:
        """Note that the published network rounds what the matrix ``name`` of a layer multiplies."""
        if part == _UNUSED:
            return
        if not isinstance(part, int):
            raise CheckpointError(f"{self._path}: what {name} multiplies cannot be rounded")
        if self.inputs[part].setdefault(name, inputs) != inputs:
            # Experts are one parameter here, which is multiplied by rounded inputs of one kind.
            raise CheckpointError(
                f"{self._path}: {name} of layer {part} multiplies {inputs.text}, and"
                f" {self.inputs[part][name].text}"
            )


class _Unread:
    """A tensor of the files, read when the loader takes its elements, and so never for long."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read = read

    def __getitem__(self, _: object) -> Tensor:
        return self._read()


class StandIn(nn.Module):
    """Takes the place of a layer without weights, whose attributes it has.

    It returns ``result`` if there is one, else its input, and keeps what it was called with.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = (layer,)
        self.result: Tensor | None = None
        self.called: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *args: Any, **options: Any) -> Any:
        self.called = args, options
        return args[0] if self.result is None else self.result


def _rows_of(
    stored: Tensor, dtype: torch.dtype, embedding: Any, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The hook that gives an embedding those rows of ``stored`` alone for which a forward asks."""
    (ids,) = args
    used, places = torch.unique(ids, return_inverse=True)
    rows = stored[used.cpu()].to(ids.device, dtype)
    embedding.weight = nn.Parameter(rows, requires_grad=False)
    return (places,)
