"""The file with the key that signs receipts: PEM, for its owner only."""

import logging
import os
import stat
from pathlib import Path

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.signature import SigningKey

_log = logging.getLogger(__name__)
_OWNER_ONLY = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def signing_key(path: Path) -> SigningKey:
    """The key in ``path``; a new one, stored there, if there is no such file.

    Raises ValueError for a file that other users may read or that has no such key, and if it cannot
    be read or made.
    """
    try:
        return _read(path) if path.exists() else _make(path)
    except ProtocolError as error:
        raise ValueError(
            f"the receipts' key file {path} {error.message}: name another file with"
            " POC_RECEIPTS_KEY_FILE, or move this one away and a new key is made"
        ) from error
    except OSError as error:
        raise ValueError(f"the receipts' key file {path}: {error.strerror}") from error


def _read(path: Path) -> SigningKey:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        raise ValueError(
            f"other users may use the receipts' key file {path} (mode {mode:04o}): run"
            f" `chmod 600 {path}`; if another user may have read it, move it away and a new key"
            " is made"
        )
    return SigningKey.from_pem(path.read_bytes())


def _make(path: Path) -> SigningKey:
    key = SigningKey.new()
    # Under another name until it is complete: a server that was killed here left half a key.
    begun = path.with_name(f"{path.name}.new")
    descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), _OWNER_ONLY)
        file.write(key.to_pem())
        file.flush()
        os.fsync(file.fileno())
    begun.rename(path)
    _log.info("made the key that signs receipts: %s, public key %s", path, key.public_key.hex())
    return key
