"""A checkpoint as the function that a proof needs: embeddings in, last hidden states out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from proofserve.engines.checkpoints import model_facts
from proofserve.engines.reference.arithmetic import KernelProfile
from proofserve.engines.reference.emulation import emulated
from proofserve.engines.reference.errors import CheckpointError
from proofserve.protocol.scheme import BlockScheme, ModelFacts

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Network:
    """The decoder of a checkpoint, and the ``head`` that turns its last states into logits.

    ``decoder`` takes ``inputs_embeds`` [n, seq_len, hidden] or ``input_ids`` [n, seq_len], and
    gives ``last_hidden_state`` [n, seq_len, hidden], after the final norm. ``facts`` are those of
    the published checkpoint, also where the weights were changed: they decide the inputs.
    ``declared_dtype`` is the one that the checkpoint says, in which servers compute by default.
    """

    decoder: nn.Module
    head: nn.Module
    facts: ModelFacts
    max_seq_len: int
    dtype: torch.dtype
    declared_dtype: torch.dtype
    device: torch.device
    kernels: KernelProfile | None = None
    """The kernels to emulate; None for those of this machine."""

    @property
    def layers(self) -> nn.ModuleList:
        return cast("nn.ModuleList", self.decoder.layers)

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the network can read."""
        embeddings = cast("Callable[[], nn.Embedding]", self.decoder.get_input_embeddings)
        return embeddings().num_embeddings

    @property
    def weights(self) -> int:
        """The number of weights in the matrices that every token is multiplied by."""
        matrices = (each for each in self.layers.modules() if isinstance(each, nn.Linear))
        return sum(each.weight.numel() for each in matrices)

    def states(self, **inputs: Tensor) -> Tensor:
        """The last hidden states of one forward; ``inputs`` are those of ``decoder``."""
        with emulated(self.decoder, self.kernels):
            states: Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state
        return states

    @torch.inference_mode()
    def values(
        self, block: BlockScheme, public_key: str, nonces: tuple[int, ...], seq_len: int
    ) -> Tensor:
        """Proof values float32 [len(nonces), width] of one forward, bad rows as NaN."""
        inputs = block.inputs(public_key, nonces, seq_len, self.dtype)
        read = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
        with ExitStack() as hooks:
            for index, layer in enumerate(self.layers if block.uses_layer_transforms else ()):
                change = partial(_transformed, block, index)
                hooks.enter_context(layer.register_forward_hook(change))
            states = self.states(**{read: inputs})
        read_states = states if block.reads_every_position else states[:, -1]
        return block.finish(public_key, nonces, read_states)


def _transformed(block: BlockScheme, index: int, _layer: nn.Module, _args: Any, out: Any) -> Any:
    return block.layer_transform(index, out)


def load(path: Path, dtype: str | None, device: str) -> Network:
    """Read a checkpoint from disk; nothing is downloaded.

    ``dtype`` is one of ``DTYPES``, or None for the checkpoint's own. Raises CheckpointError.
    """
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has no config.json")
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    place = _device(device)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        wanted = DTYPES[dtype] if dtype else config.dtype or torch.bfloat16
        with _no_progress_bar():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    decoder = model.get_decoder()
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise CheckpointError(f"{path} holds a {type(decoder).__name__}, which has no layers")
    return Network(
        decoder=decoder.to(place).eval(),
        head=model.get_output_embeddings().to(place),
        facts=model_facts(path, config.hidden_size),
        max_seq_len=config.max_position_embeddings,
        dtype=wanted,
        declared_dtype=config.dtype or torch.bfloat16,
        device=place,
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise CheckpointError(f"unknown device {name!r}; try cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CheckpointError("this torch sees no GPU; choose the device cpu")
    return device
