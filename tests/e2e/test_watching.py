"""What an operator sees of a served node: vLLM's page of metrics, and the deep health check."""

import pytest

from support.node import ServedNode, until

pytestmark = pytest.mark.engine


def test_the_node_is_on_vllms_page_and_computes_when_asked(node: ServedNode) -> None:
    node.start_round()
    until(lambda: node.processed() >= 32)
    assert node.call("GET", "/health/deep")["seconds"] > 0
    node.stop()
    assert node.call("GET", "/health/ready") == {"status": "ok"}
    page = node._http.get("/metrics").text
    assert "\nvllm:" in page
    shown = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("proofserve"))
    assert float(shown['proofserve_nonces_total{outcome="proved",work="round"}']) >= 32
    assert float(shown["proofserve_forward_seconds_count"]) > 0
    assert shown["proofserve_leased_blocks"] == "0.0"
