"""Small checkpoints for the tests, written when first asked for."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from proofserve.models.architectures import ARCHITECTURES, SHAPES
from proofserve.models.writer import write_model
from support.mixtures import seeded

# Measured: proofserve calibrate noise qwen --size tiny --one reference:float32
# --other reference:bfloat16 --nonces 3688 --rate 0.001 --seq-len 32.
TINY_THRESHOLD = "0.0398"


class SmallModels:
    """A folder of checkpoints."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, arch: str, seed: int = 0) -> Path:
        """The tiny checkpoint of an architecture."""
        path = self._root / f"{arch}-{seed}"
        if not path.exists():
            write_model(path, arch, "tiny", seed)
        return path

    def flat(self) -> Path:
        """Four layers of N(0, 0.02), as a model is born: a proof hardly feels any of them."""
        path = self._root / "flat"
        if not path.exists():
            config = ARCHITECTURES["qwen3"].config(replace(SHAPES["tiny"], layers=4))
            config.initializer_range = 0.02
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            model.save_pretrained(path)
        return path

    def mixture(self) -> Path:
        """Two layers of 8 experts, 2 a token: much quicker than the tiny one."""
        path = self._root / "mixture"
        if not path.exists():
            config = ARCHITECTURES["qwen3_moe"].config(replace(SHAPES["tiny"], layers=2, hidden=64))
            config.num_experts, config.num_experts_per_tok = 8, 2
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            seeded(model)
            model.bfloat16().save_pretrained(path)
            for file in self.get("qwen3").glob("tokenizer*"):
                shutil.copy(file, path)
        return path

    def broken(self) -> Path:
        """A checkpoint whose last norm is not a number: it loads, and every proof row is NaN."""
        path = self._root / "broken"
        if not path.exists():
            write_model(path, "qwen3", "tiny", 0)
            file = path / "model.safetensors"
            tensors = load_file(file)
            tensors["model.norm.weight"] = torch.full_like(
                tensors["model.norm.weight"], float("nan")
            )
            save_file(tensors, file, metadata={"format": "pt"})
        return path
