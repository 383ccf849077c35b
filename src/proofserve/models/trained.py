"""The trained small model: its files in this package, which ``make train-model`` made."""

import hashlib
import json
import shutil
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from transformers import PreTrainedTokenizerFast

TRAINED: Final = "trained"
"""The name by which commands know the model."""
WEIGHTS_DIGEST: Final = "d5644de1b24dacc06b32c5f3a2dd8b6db25cded373a2c7e79b3f72d99ae5b9ce"
"""As ``docs/native.md`` defines it; a part of every seed of ``sketch-v1``."""
TOKENS_DIGEST: Final = "ef508ad02aed99c8aedb526ee6af0253318a0833257bd80fff6ef98ed04783aa"
"""SHA-256 of the vocabulary that the model was trained with, see ``tokens_digest``."""

_COPIED: Final = ("config.json", "model.safetensors")


class OtherTokensError(ValueError):
    """The tokenizer is not the one that the model was trained with."""


def files() -> Traversable:
    """The folder with ``config.json``, ``model.safetensors`` and ``calibration.json``.

    The tokenizer is not among them: every model of this package has the same one.
    """
    return resources.files("proofserve.models").joinpath(TRAINED)


def copy_weights(folder: Path) -> None:
    """Copy the configuration and the weights into ``folder``, which exists."""
    for name in _COPIED:
        with files().joinpath(name).open("rb") as packed, (folder / name).open("xb") as copy:
            shutil.copyfileobj(packed, copy)


def tokens_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """SHA-256 of all tokens, special ones included, in the order of their ids, as JSON."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def require_own_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise OtherTokensError unless the model knows these tokens by these ids.

    Another version of the package ``tokenizers`` could learn others from the same text.
    """
    if (found := tokens_digest(tokenizer)) != TOKENS_DIGEST:
        raise OtherTokensError(
            f"tokenizer: the trained model knows the tokens {TOKENS_DIGEST[:12]}, the installed"
            f" package tokenizers made {found[:12]}; install its version of requirements/cpu.lock"
        )
