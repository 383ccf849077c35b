"""A checkpoint's folder: its tensors by name, the digest of its weights, its ordinary tokens.

The digest binds proofs to weights (``docs/native.md``). It is SHA-256 over one line "name dtype
shape sha256" for each tensor, in the order of the names; dtype and shape as safetensors writes
them, the last hash over the tensor's bytes. How the tensors are spread over files does not matter.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from proofserve.engines import CheckpointError
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.scheme import AllowedTokens, ModelFacts, allowed_tokens

_logger = logging.getLogger(__name__)

CACHE: Final = "weights_digest.json"
INDEX: Final = "model.safetensors.index.json"
_CHUNK: Final = 2**24
# Bytes, as much as Linux reads ahead at least.
READ_AHEAD: Final = 2**17
_WITHOUT = "sketches cannot be proved with this checkpoint: %s"


def checkpoint_folder(name: str, revision: str | None, cache: str | None) -> Path | None:
    """The folder from which vLLM read the model ``name``: a path, or a repository in the cache.

    None if there is no such folder, as for weights that are streamed from a store.
    """
    if Path(name).is_dir():
        return Path(name)
    # A part of vLLM's and of transformers' own requirements; the digest alone needs neither.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

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
    from transformers import AutoTokenizer  # noqa: PLC0415 - as above, and takes seconds

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


def weights_digest(folder: Path) -> str:
    """The digest of the checkpoint in ``folder``, in hexadecimal.

    Hashing takes about a second per gigabyte, so the result is kept beside the files, with their
    sizes and times; a folder that cannot be written is hashed each time. Raises ProtocolError for a
    folder without safetensors files, or with a broken one.
    """
    stamp = _stamp(folder)
    if (known := _kept(folder)).get("files") == stamp:
        return str(known["weights_digest"])
    gigabytes = sum(size for size, _ in stamp.values()) / 1e9
    _logger.info("hashing the weights in %s, %.1f GB, a second or so for each", folder, gigabytes)
    lines = sorted(line for name in stamp for line in _lines(folder / name))
    digest = hashlib.sha256(b"".join(line for _, line in lines)).hexdigest()
    _logger.info("the weights digest is %s", digest)
    keep_digest(folder, digest)
    return digest


def keep_digest(folder: Path, digest: str) -> None:
    """Have ``weights_digest`` answer ``digest`` until a file of the checkpoint changes.

    Nothing compares it with the weights: only proofs show what a server computes with.
    """
    try:
        known = {"weights_digest": digest, "files": _stamp(folder)}
        (folder / CACHE).write_text(json.dumps(known), "utf-8")
    except OSError as error:
        # A read-only checkpoint, as in a container: the digest is computed at each start.
        _logger.info("the weights digest is not kept for the next start: %s", error)


def digest_is_kept(folder: Path) -> bool:
    """Whether ``weights_digest`` answers without reading the weights."""
    try:
        return _kept(folder).get("files") == _stamp(folder)
    except ProtocolError:
        return False


def _kept(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / CACHE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _stamp(folder: Path) -> dict[str, list[int]]:
    """Size in bytes and time of each file with weights, in the order of their names."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ProtocolError("weights_digest", f"{folder} has no safetensors files")
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def _lines(file: Path) -> Iterator[tuple[bytes, bytes]]:
    """The name of each tensor of a file, and its line."""
    with file.open("rb") as opened:
        for name, (about, where) in _header(file).items():
            opened.seek(where.start)
            content = hashlib.sha256()
            # In chunks: pages of a mapped file would count as memory of the process.
            for begin in range(0, len(where), _CHUNK):
                content.update(opened.read(min(_CHUNK, len(where) - begin)))
            if opened.tell() < where.stop:
                raise ProtocolError("weights_digest", f"{file} ends within {name}")
            shape = "[" + ",".join(map(str, about["shape"])) + "]"
            line = f"{name} {about['dtype']} {shape} {content.hexdigest()}\n"
            yield name.encode(), line.encode()


def _header(file: Path) -> dict[str, tuple[dict[str, Any], range]]:
    """What a safetensors file says of each of its tensors, and where the tensor's bytes lie."""
    with file.open("rb") as opened:
        try:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        except ValueError as error:
            raise ProtocolError("weights_digest", f"{file} is no safetensors file") from error
        begin = opened.tell()
    header.pop("__metadata__", None)
    ends = {name: about["data_offsets"] for name, about in header.items()}
    return {n: (header[n], range(begin + start, begin + end)) for n, (start, end) in ends.items()}


class CheckpointFiles:
    """The tensors of a checkpoint by name; ``places`` has the file of each and where its bytes lie.

    Raises CheckpointError for files that do not fit each other, and where they are ``needed`` for
    missing ones; else there are no tensors then.
    """

    def __init__(self, path: Path, *, needed: bool = True) -> None:
        self._path = path
        self._opened: dict[Path, Any] = {}
        self.places: dict[str, tuple[Path, range]] = {}
        for file in _files(path, needed=needed):
            with named_errors(file):
                self._opened[file] = safe_open(file, "pt", backend="pread")
            for name, (_, where) in _header(file).items():
                if name in self.places:
                    others = f"{self.places[name][0].name} and {file.name}"
                    raise CheckpointError(f"{path}: {others} both hold {name}")
                self.places[name] = file, where
        self.names = self.places.keys()
        self._reader = ThreadPoolExecutor(1, "reading-ahead")

    def dtype(self, name: str) -> str:
        """In the names of safetensors."""
        return str(self._opened[self.places[name][0]].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        with named_errors(self._path):
            found: Tensor = self._opened[self.places[name][0]].get_tensor(name)
        return found

    def read_ahead(self, names: Iterable[str]) -> None:
        """Have the system read tensors into its cache, while something else computes."""

        def announce(places: Iterable[tuple[Path, range]]) -> None:
            for file, where in places:
                with file.open("rb") as opened:
                    # The system reads no more than a part of what one call asks for.
                    for begin in range(where.start, where.stop, READ_AHEAD):
                        size = min(READ_AHEAD, where.stop - begin)
                        os.posix_fadvise(opened.fileno(), begin, size, os.POSIX_FADV_WILLNEED)

        self._reader.submit(announce, [self.places[each] for each in names])

    def mapped(self, name: str) -> Tensor:
        """The tensor, of which only what is touched comes into memory."""
        with named_errors(self._path):
            opened: Any = safe_open(self.places[name][0], "pt")
            found: Tensor = opened.get_tensor(name)
        return found


def _files(path: Path, *, needed: bool) -> list[Path]:
    """The files that the index names, or all of them; see ``CheckpointFiles``."""
    files = sorted(path.glob("*.safetensors"))
    if (index := path / INDEX).is_file():
        named = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        files = sorted(path / name for name in named)
    missing = [file.name for file in files if not file.is_file()]
    if needed and missing:
        raise CheckpointError(f"{path}: {', '.join(missing)} of the index is missing")
    if needed and not files:
        raise CheckpointError(f"{path} cannot be loaded: it has no safetensors files")
    return [] if missing else files


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
