"""One step of a real engine that takes several times the limit is work, not a hang."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from proofserve.models.writer import write_model
from support.node import NAME, serve

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STALL_S = 1.5
# All of them in one step: tens of seconds on one core without matrix instructions.
PROMPTS = [[11 + number] * 4000 for number in range(4)]
ONE_STEP = ("--max-model-len", "4096", "--max-num-batched-tokens", "16384")


def test_a_long_step_of_prefill_is_not_reported(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3", "small", 0)
    settings = {"POC_ENGINE_STALL_SEC": str(STALL_S)}
    with (
        serve(tmp_path / "model", tmp_path, ONE_STEP, **settings) as node,
        httpx.Client(base_url=node.server.url, timeout=300) as client,
        ThreadPoolExecutor(1) as one,
    ):
        body = {"model": NAME, "prompt": PROMPTS, "max_tokens": 1}
        asked = one.submit(client.post, "/v1/completions", json=body)
        longest = 0.0
        while not asked.done():
            assert node.call("GET", "/health/ready") == {"status": "ok"}
            scrape = node.request("GET", "/metrics").text.splitlines()
            ages = [each for each in scrape if each.startswith("proofserve_core_step_age_seconds{")]
            longest = max(longest, float(ages[0].split()[1]))
        assert asked.result().is_success
        print(f"the longest step took more than {longest:.1f} s")
        assert longest > 2 * STALL_S
        assert "has not stepped" not in node.server.log.read_text()
