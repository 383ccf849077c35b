"""The facts of a checkpoint that schemes use: hidden size, weights digest, ordinary tokens."""

import logging
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoTokenizer

from proofserve.engines.checkpoints.digest import weights_digest
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.model import AllowedTokens, allowed_tokens
from proofserve.protocol.scheme import ModelFacts

_logger = logging.getLogger(__name__)
_WITHOUT = "sketches cannot be proved with this checkpoint: %s"


def checkpoint_folder(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder from which vLLM read the model ``name``: a path, or a repository in the cache.

    None if there is no such folder, as for weights that are streamed from a store.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        found = snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError):
        return None
    return Path(found)


def model_facts(folder: Path | None, hidden_size: int) -> ModelFacts:
    """The facts of the checkpoint in ``folder``.

    Schemes of version 1 need neither digest nor tokens, so what a checkpoint lacks is None, and the
    log says why. Reads every weight where the digest is not known yet.
    """
    if folder is None:
        _logger.info(_WITHOUT, "it has no folder on this machine")
        return ModelFacts(hidden_size)
    try:
        digest = weights_digest(folder)
    except ProtocolError as error:
        _logger.info(_WITHOUT, error)
        digest = None
    return ModelFacts(hidden_size, digest, _tokens(folder))


def _tokens(folder: Path) -> AllowedTokens | None:
    """The ids of the vocabulary less special and added ones; None without a usable tokenizer."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        _logger.info(_WITHOUT, f"no tokenizer: {error}")
        return None
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    try:
        return allowed_tokens(set(tokenizer.get_vocab().values()) - added)
    except ProtocolError as error:
        _logger.info(_WITHOUT, error)
        return None
