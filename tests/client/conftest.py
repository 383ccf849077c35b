from pathlib import Path

import pytest

from proofserve.remote import recorder as receipts


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "POLL_S", 0.01)
    monkeypatch.setattr(receipts, "RECEIPT_S", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "chats"
