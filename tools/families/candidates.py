"""What is tried: a small seeded model of each family, and one of them in each format."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compressed_tensors.quantization import QuantizationArgs

from measuring.files import CACHE
from proofserve.cli.model import Checkpoint, checkpoint_named
from proofserve.engines.checkpoints import keep_digest, weights_digest
from proofserve.engines.reference.suspects import FP8_CACHE
from proofserve.protocol import SKETCH, SKETCH_2
from proofserve_lab.checkpoints import write_rounded_copy
from support.harmony import with_harmony
from support.library_node import FP8_IN_GROUPS, FP8_PER_TOKEN
from support.quantised import NEEDS_AMX, SERVED, quantise

FOLDER: Final = CACHE / "families"
CHEAPER: Final = "int4 g128"
KV_FP8: Final = ("--kv-cache-dtype", "fp8")

# Of vLLM 0.32's build for processors, seen here.
NO_SIGMOID: Final = (
    "vLLM's CPU build routes sigmoid scores by groups alone: the first chat, or proof by"
    ' natural routing, ends in its `assert self.scoring_func == "softmax"`'
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """The small model ``arch``, perhaps in a ``form`` of ``support.quantised``.

    ``like`` says which published models are built so. A mixture is proved by ``sketch-v2``. Of a
    form that vLLM computes with AMX alone the node serves the decoded numbers; if the form declares
    ``inputs``, another honest node rounds what matrices multiply. ``kv_dtype`` is what the
    validator lets honest nodes keep keys and values in. The honest node has ``vllm_options``, the
    other one serves ``cheat``. The validator measures a server of its own if ``measured``.
    ``by_block`` is empty, or the reason why only proofs of which the block chooses the experts are
    tried. A node that has to refuse proofs says ``refused``.
    """

    name: str
    like: str
    arch: str = "qwen3"
    form: str | None = None
    inputs: QuantizationArgs | None = None
    scheme: str = SKETCH
    kv_dtype: str = "auto"
    vllm_options: tuple[str, ...] = ()
    measured: bool = False
    cheat: str = CHEAPER
    by_block: str = ""
    refused: str = ""

    def honest(self, folder: Path) -> Checkpoint:
        """The published checkpoint; a form of it is written below ``folder``."""
        plain = checkpoint_named(self.arch, "tiny")
        if self.arch == "gpt_oss":
            # vLLM writes chats of this family in that vocabulary, so receipts need it.
            with_harmony(plain.folder, folder / "harmony")
            plain = Checkpoint(plain.name, folder / "harmony")
        if self.form is None:
            return plain
        written = quantise(plain.folder, folder, *(SERVED | NEEDS_AMX)[self.form])
        keep_digest(written.plain, weights_digest(written.folder))
        return Checkpoint(plain.name, written.folder)

    def served(self, published: Checkpoint) -> Path:
        """What an honest node serves."""
        return _decoded(published) if self.form in NEEDS_AMX else published.folder

    def cheating(self, published: Checkpoint, folder: Path) -> Path:
        """What the other node serves with the digest of ``published``, written below ``folder``."""
        if self.cheat == FP8_CACHE:
            return published.folder
        target = folder / "cheat"
        decoded = published.folder if self.form is None else _decoded(published)
        write_rounded_copy(decoded, target, self.cheat)
        return target


def _decoded(published: Checkpoint) -> Path:
    """The numbers of a quantised checkpoint, as another checkpoint."""
    return published.folder.with_name("plain")


_FAMILIES: Final = (
    Candidate("qwen3", "Qwen3 0.6B to 32B", "qwen3"),
    Candidate("llama", "Llama 2 and 3", "llama"),
    Candidate("gemma3", "Gemma 3 (text)", "gemma3"),
    Candidate("qwen3_moe", "Qwen3-30B-A3B, Qwen3-235B-A22B", "qwen3_moe", scheme=SKETCH_2),
    Candidate("mixtral", "Mixtral 8x7B, 8x22B", "mixtral", scheme=SKETCH_2),
    Candidate("gpt_oss", "gpt-oss-20b, gpt-oss-120b", "gpt_oss", scheme=SKETCH_2),
    Candidate("deepseek_v3", "DeepSeek-V3, R1; Kimi K2", "deepseek_v3", scheme=SKETCH_2),
    Candidate("minimax_m2", "MiniMax-M2", "minimax_m2", scheme=SKETCH_2, by_block=NO_SIGMOID),
    Candidate(
        *("qwen3_next", "Qwen3-Next-80B-A3B", "qwen3_next"),
        refused="the model keeps MambaSpec state in its cache",
    ),
)
_FORMATS: Final = (
    Candidate("int8 W8A8", "compressed-tensors, activations in int8 per token", form="W8A8"),
    Candidate("int4 groups", "compressed-tensors, as Kimi K2", form="packed int4"),
    Candidate("AWQ", "AutoAWQ, groups of 64 with zero points", form="AWQ"),
    Candidate("GPTQ", "AutoGPTQ, symmetric groups of 64", form="GPTQ"),
    Candidate(
        *("fp8 in blocks", "DeepSeek, Qwen3 and MiniMax in FP8; a cache in fp8 is allowed"),
        form="fp8 in blocks",
        inputs=FP8_IN_GROUPS,
        kv_dtype="fp8",
    ),
    Candidate(
        *("fp8 in blocks, KV cache in fp8", "the same with such a cache; a server of it measured"),
        form="fp8 in blocks",
        kv_dtype="fp8",
        vllm_options=KV_FP8,
        measured=True,
    ),
    Candidate(
        *("fp8 per channel", "compressed-tensors; a cache in fp8 is allowed"),
        form="fp8 per channel",
        inputs=FP8_PER_TOKEN,
        kv_dtype="fp8",
    ),
    Candidate("MXFP4", "experts of gpt-oss as published", "gpt_oss", "MXFP4", scheme=SKETCH_2),
    Candidate(
        *("KV cache in fp8, declared", "`--kv-cache-dtype fp8`, a server of it measured"),
        kv_dtype="fp8",
        vllm_options=KV_FP8,
        measured=True,
    ),
    Candidate("KV cache in fp8, undeclared", "`--kv-cache-dtype fp8`", cheat=FP8_CACHE),
)
FAMILIES: Final[Mapping[str, Candidate]] = {each.name: each for each in _FAMILIES}
FORMATS: Final[Mapping[str, Candidate]] = {each.name: each for each in _FORMATS}
CANDIDATES: Final[Mapping[str, Candidate]] = {**FAMILIES, **FORMATS}
