from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from proofserve.engines.reference.forward import states
from proofserve.engines.reference.network import load
from proofserve.verifier.audit.deployment import Price, price_of

# 16 + 8 + 72 multiplications per token and layer, 8 per pair of tokens.
PRICE = Price(hidden=2, layers=3, heads=2, kv_heads=1, head_dim=2, intermediate=12, seq_len=4)


def test_a_price_by_hand() -> None:
    whole = 3 * (4 * (16 + 8 + 72) + 10 * 8)
    unread_mlp = 3 * 72
    honest = whole - unread_mlp
    assert PRICE.honest == honest
    assert PRICE.unread_mlp == unread_mlp / whole
    # Three queries, and the pairs of the first three tokens: 1 + 2 + 3.
    assert PRICE.unread_attention == (3 * 16 + 6 * 8) / honest


def test_savings_by_hand() -> None:
    honest, layer = PRICE.honest, 4 * (16 + 8 + 72) + 10 * 8
    # The new last layer's unread MLP can be left out as that of the old one could.
    assert PRICE.without_layers(1) == pytest.approx(layer / honest)
    assert PRICE.without_layers(3) == 1.0
    assert PRICE.without_layers(0) == PRICE.tokens(4) == PRICE.bits(16) == 0.0
    assert PRICE.tokens(1) == pytest.approx(1 - 3 * (16 + 8 + 72 + 8) / honest)
    attention = 3 * 10 * 8
    assert PRICE.bits(8) == pytest.approx((honest - attention) / honest / 2)


def test_the_count_is_that_of_torch(tiny: Path) -> None:
    network = load(tiny, None, "cpu")
    seq_len = 16
    price = price_of(network, seq_len)
    inputs = torch.zeros(1, seq_len, price.hidden, dtype=network.dtype)
    with FlopCounterMode(display=False) as counter:
        states(network, inputs)
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    matrices = counts["aten.mm"]
    # Torch counts a multiplication and its addition as two.
    assert matrices == 2 * price.layers * seq_len * (price.queries + price.keys + price.mlp)
    pairs = seq_len * (seq_len + 1) // 2
    assert price.honest == (
        matrices // 2 + price.layers * pairs * price.pair - (seq_len - 1) * price.mlp
    )
