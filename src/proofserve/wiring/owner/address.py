"""The file beside the outbox that says which process owns the proofs, and where it answers."""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class OwnerAddress:
    """``server`` is the same in all API processes of one server: see ``this_server``.

    ``process`` is the owner's id, ``socket`` the path of its unix socket.
    """

    server: str
    process: int
    socket: str


def this_server() -> str:
    """The process that started this one and its siblings: its id, and its start in clock ticks.

    Ids alone repeat, in containers above all.
    """
    parent = os.getppid()
    # Field 22 of proc(5); the second one is a name in parentheses, which may hold spaces.
    fields = Path(f"/proc/{parent}/stat").read_text("utf-8").rpartition(")")[2].split()
    return f"{parent}-{fields[19]}"


def address_file(outbox: Path) -> Path:
    return outbox.with_name(f"{outbox.name}.owner")


def publish(outbox: Path, address: OwnerAddress) -> None:
    """Write the file in one step: another process reads the old address or the new one."""
    path = address_file(outbox)
    written = path.with_name(f"{path.name}.{address.process}")
    written.write_text(json.dumps(asdict(address)), "utf-8")
    os.replace(written, path)  # noqa: PTH105 - the same as Path.replace, which hides that it is atomic


def withdraw(outbox: Path) -> None:
    with suppress(OSError):
        address_file(outbox).unlink(missing_ok=True)


def read(outbox: Path) -> OwnerAddress | None:
    """The last published address; None without one. Its process may have been killed since."""
    try:
        return OwnerAddress(**json.loads(address_file(outbox).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
