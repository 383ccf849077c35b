"""The file of the key that signs receipts: made once, for its owner only."""

import os
import stat
from pathlib import Path

import pytest

from proofserve.outbox.receipts import signing_key
from proofserve.protocol.receipts.record import SigningKey


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return tmp_path / "outbox.receipts.pem"


def test_a_key_is_made_once_and_only_its_owner_may_read_it(key_file: Path) -> None:
    umask = os.umask(0)
    try:
        made = signing_key(key_file)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert list(key_file.parent.iterdir()) == [key_file]
    assert signing_key(key_file).public_key == made.public_key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o606, 0o610, 0o777])
def test_a_key_that_others_may_use_is_refused(key_file: Path, mode: int) -> None:
    signing_key(key_file)
    key_file.chmod(mode)
    with pytest.raises(ValueError, match=rf"\(mode {mode:04o}\): run `chmod 600 {key_file}`"):
        signing_key(key_file)
    key_file.chmod(0o400)
    signing_key(key_file)


def test_a_start_that_was_killed_while_it_made_the_key_does_not_matter(key_file: Path) -> None:
    begun = key_file.with_name(f"{key_file.name}.new")
    begun.write_bytes(b"-----BEGIN PRI")
    begun.chmod(0o644)
    made = signing_key(key_file)
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert SigningKey.from_pem(key_file.read_bytes()).public_key == made.public_key
    assert not begun.exists()


def test_a_file_that_is_no_key_is_refused_and_left_alone(key_file: Path) -> None:
    key_file.write_bytes(b"my notes")
    key_file.chmod(0o600)
    with pytest.raises(ValueError, match="POC_RECEIPTS_KEY_FILE"):
        signing_key(key_file)
    assert key_file.read_bytes() == b"my notes"


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere/key\.pem: No such file"):
        signing_key(tmp_path / "nowhere" / "key.pem")
