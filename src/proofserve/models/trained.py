"""The trained small models: their files in this package, which ``make train-model`` made."""

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
"""SHA-256 of the vocabulary that the models were trained with, see ``tokens_digest``."""

CALIBRATIONS: Final[Mapping[str, str]] = {
    SKETCH: "calibration.json",
    SKETCH_2: "calibration.json",
    ARTIFACT: "artifact_calibration.json",
    RECEIPT: "chat_calibration.json",
}
"""The file of a scheme; a model has one of the sketches."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """One of them: ``name`` is how commands know it.

    ``weights_digest`` is as ``docs/native.md`` defines it, a part of every seed of sketches. The
    package has a calibration of each scheme in ``calibrated``.
    """

    name: str
    weights_digest: str
    calibrated: tuple[str, ...]

    def files(self) -> Traversable:
        """The folder with ``config.json``, ``model.safetensors`` and calibrations.

        The tokenizer is not among them: every model of this package has the same one.
        """
        return resources.files("proofserve.models").joinpath(self.name)

    def copy_weights(self, folder: Path) -> None:
        """Copy the configuration and the weights into ``folder``, which exists."""
        for name in ("config.json", "model.safetensors"):
            packed = self.files().joinpath(name)
            with packed.open("rb") as source, (folder / name).open("xb") as copy:
                shutil.copyfileobj(source, copy)


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
TRAINED_MODELS: Final[Mapping[str, TrainedModel]] = {each.name: each for each in (DENSE, MIXTURE)}


def tokens_digest(tokenizer: "PreTrainedTokenizerFast") -> str:
    """SHA-256 of all tokens, special ones included, in the order of their ids, as JSON."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def require_own_tokens(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Raise ValueError unless the models know these tokens by these ids.

    Another version of the package ``tokenizers`` could learn others from the same text.
    """
    if (found := tokens_digest(tokenizer)) != TOKENS_DIGEST:
        raise ValueError(
            f"tokenizer: the trained models know the tokens {TOKENS_DIGEST[:12]}, the installed"
            f" package tokenizers made {found[:12]}; install its version of requirements/cpu.lock"
        )
