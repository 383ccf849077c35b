"""API processes of their own, with real sockets and a real outbox: the owner is killed."""

import json
import signal
from pathlib import Path

import pytest

from api.support import ORDER
from proofserve.wiring.owner import address_file
from support.pace import wait_until
from wiring.api_processes import processed, served


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_each_next_owner_goes_on_and_no_nonce_is_lost_or_twice(
    number: signal.Signals, tmp_path: Path
) -> None:
    with served(tmp_path, 3) as processes:
        left = list(processes)
        left[-1].ask("POST", "/init/generate", json=ORDER)
        round_id = left[0].ask("GET", "/status")["round_id"]
        while len(left) > 1:
            before = processed(left[0])
            wait_until(lambda before=before: processed(left[0]) > before + 50)
            found = json.loads(address_file(tmp_path / "outbox.sqlite").read_text())
            (owner,) = [each for each in left if each.process.pid == found["process"]]
            left.remove(owner)
            reported = processed(left[0])
            owner.process.send_signal(number)
            owner.process.wait(30)
            # Every process that is left answers, and the round is the same.
            for each in left:
                status = each.ask("GET", "/status")
                assert (status["round_id"], status["status"]) == (round_id, "GENERATING")
                assert status["stats"]["total_processed"] >= reported
        before = processed(left[0])
        wait_until(lambda: processed(left[0]) > before + 50)
        left[0].ask("POST", "/stop")
        rows = left[0].ask("GET", "/results?limit=10000")["results"]
        nonces = [row["nonce"] for row in rows]
        assert len(nonces) > 150
        assert nonces == [1 + 3 * index for index in range(len(nonces))]
        assert {row["round_id"] for row in rows} == {round_id}
