"""The short form of ``make chaos`` and ``make soak``: one served node, seconds instead of minutes."""

from pathlib import Path

import pytest

from endurance import files
from endurance.load import order
from endurance.servers import Receiver
from endurance.witness import Witness
from support.node import NAME, ServedNode, until

pytestmark = pytest.mark.engine


def test_a_receiver_killed_again_and_again_has_every_proof_once(
    node: ServedNode, tmp_path: Path
) -> None:
    with Receiver(tmp_path) as receiver, Witness(node.server.url) as witness:
        receiver.start()
        for number in range(2):
            work = order(number, NAME, receiver.url)
            node.call("POST", "/init/generate", work.body)
            for _ in range(2):
                before = node.processed()
                until(lambda before=before: node.processed() > before + 16)
                receiver.kill("receiver")
                receiver.bury()
                receiver.start()
            node.stop()
        until(lambda: node.status()["outbox"]["pending"] == 0, seconds=60)
        outbox = Path(node.server.log).with_name("outbox.sqlite")
    books = files.compare(outbox, receiver.database, receiver.url)
    seen = witness.compare(files.results(outbox))
    assert books.produced >= seen.seen > 64
    assert (seen.lost, seen.overstated) == (0, 0)
    assert (books.missing, books.foreign, books.duplicates) == (0, 0, 0)
    assert not books.damaged
