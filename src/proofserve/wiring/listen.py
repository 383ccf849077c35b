"""Where servers listen: ports, bound before the server starts, and folders of unix sockets."""

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The longest path of a socket that the system allows, bytes.
SOCKET_PATH = 107
PREFIX = "proofserve-"

HINT = " Another process uses it: end that process, or choose another port with --port / VLLM_PORT."


def bound_sockets(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of ``host``, which does not accept connections yet.

    Raises OSError with a sentence for the operator.
    """
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind, proto)
            sockets.append(one)
            # Connections of a server that has just ended must not hold the port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as error:
        for one in sockets:
            one.close()
        raise cannot_listen(host, port, error) from error
    return sockets


def cannot_listen(host: str, port: int, error: OSError) -> OSError:
    hint = HINT if error.errno == errno.EADDRINUSE else ""
    return OSError(f"cannot listen on {host}, port {port}: {error.strerror}.{hint}")


@contextmanager
def folder_for_sockets(longest: str) -> Iterator[Path]:
    """A new folder that only this user may enter, short enough for a socket named ``longest``."""
    base = tempfile.gettempdir()
    short = len(os.fsencode(base)) <= SOCKET_PATH - len(f"/{PREFIX}12345678/{longest}")
    place = base if short else "/tmp"  # noqa: S108 - only this user may enter the folder in it
    # A process that is being killed may still create a file there meanwhile.
    with tempfile.TemporaryDirectory("", PREFIX, place, ignore_cleanup_errors=True) as path:
        yield Path(path)
