import hashlib
import math

import numpy as np
import pytest
import torch

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.receipts.sketches import ReceiptScheme, sketches

DIGEST = "70" * 32
CPU = torch.device("cpu")
SCHEME = ReceiptScheme("day 1", DIGEST)


def test_the_rows_are_signs_of_the_key_and_the_weights() -> None:
    fields = [b"rows", b"day 1", bytes.fromhex(DIGEST), (32).to_bytes(8, "little")]
    packed = b"".join(len(f).to_bytes(4, "little") + f for f in fields)
    seed = hashlib.sha256(b"proofserve receipt-v1\0" + packed).digest()
    drawn = hashlib.shake_256(seed).digest(32 * 48 // 8)
    bits = [(drawn[i // 8] >> (i % 8)) & 1 for i in range(32 * 48)]
    expected = (np.array(bits) * 2 - 1).reshape(32, 48) / math.sqrt(32)
    assert np.allclose(SCHEME.rows(48, CPU).numpy(), expected)
    other = ReceiptScheme("day 2", DIGEST).rows(48, CPU)
    assert not torch.equal(SCHEME.rows(48, CPU), other)


def test_a_sketch_estimates_the_distance_of_directions() -> None:
    torch.manual_seed(0)
    one = torch.randn(200, 512)
    other = one + 0.1 * torch.randn(200, 512)
    rows = ReceiptScheme("k", DIGEST, 64).rows(512, CPU)
    apart = (sketches(one, rows) - sketches(3 * other, rows)).norm(dim=1)
    assert float(apart.mean()) == pytest.approx(0.1, rel=0.1)


def test_a_broken_state_gives_no_number() -> None:
    states = torch.ones(3, 48)
    states[1, 5] = torch.inf
    states[2] = torch.nan
    made = sketches(states, SCHEME.rows(48, CPU))
    assert made.isfinite().all(dim=1).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("k_dim", "digest", "field"),
    [
        (15, DIGEST, "k_dim"),
        (65, DIGEST, "k_dim"),
        (32, "70", "weights_digest"),
        (32, "x", "weights"),
    ],
)
def test_a_scheme_out_of_range_is_refused(k_dim: int, digest: str, field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        ReceiptScheme("k", digest, k_dim)
