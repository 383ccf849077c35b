"""An honest node without vLLM or our engine: transformers in bfloat16, with rounded activations.

What matrices multiply is rounded by compressed-tensors, as servers with kernels for fp8 do it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from proofserve.engines.reference.network import load
from proofserve.protocol.codec import encode
from proofserve.protocol.verdict.comparison import Claim
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Workload

_FP8: Final = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
FP8_PER_TOKEN: Final = QuantizationArgs(**_FP8, strategy="token")
FP8_IN_GROUPS: Final = QuantizationArgs(**_FP8, strategy="group", group_size=128)


class LibraryNode:
    """Serves the decoded numbers in ``plain``, a dense checkpoint, as ``published`` declares them.

    ``inputs`` is how every matrix of a layer rounds what it multiplies.
    """

    def __init__(self, published: Path, plain: Path, inputs: QuantizationArgs) -> None:
        network = load(published, "float32", "cpu")
        self._facts, self._device = network.facts, network.device
        self._model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        exact: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
        weights = dict(exact.model.layers.named_parameters())
        for name, module in self._model.model.layers.named_modules():
            if isinstance(module, nn.Linear):
                weight = weights[f"{name}.weight"]
                module.forward = partial(_multiplied, module, weight, inputs)  # type: ignore[method-assign]

    @torch.inference_mode()
    def claims(self, work: Workload, nonces: Sequence[int], at_once: int) -> list[Claim]:
        """What the node says of ``nonces``, ``at_once`` of them in a forward."""
        block = work.scheme.for_block(work.block, self._facts, self._device)
        made: list[Claim] = []
        for part in chunks(nonces, at_once):
            read = block.inputs(work.public_key, part, work.seq_len, torch.bfloat16)
            name = "inputs_embeds" if read.is_floating_point() else "input_ids"
            states = self._model.model(**{name: read}, use_cache=False).last_hidden_state
            seen = states if block.reads_every_position else states[:, -1]
            rows = block.finish(work.public_key, part, seen.float()).numpy()
            made += map(Claim, part, encode(rows))
        return made


def _multiplied(
    module: nn.Module, weight: Tensor, inputs: QuantizationArgs, read: Tensor
) -> Tensor:
    values = read.float()
    scale, zero = compute_dynamic_scales_and_zp(values, inputs, module)
    rounded = fake_quantize(values, scale, zero, inputs)
    # A kernel for fp8 adds up in float32, and writes the dtype that is served.
    return functional.linear(rounded, weight).to(read.dtype)
