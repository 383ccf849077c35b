"""Claims whose vectors are texts, as they must be, but not vectors: they get a verdict.

With 422 instead, a prover that publishes garbage could not be convicted.
"""

import base64
import time
from typing import Any

import httpx
import numpy as np

from fuzz.nodes import POW


def _text(values: list[float], kind: str = "<f2") -> str:
    return base64.b64encode(np.array(values, dtype=kind).tobytes()).decode()


def garbage(k_dim: int) -> dict[str, str]:
    """Texts that are no vector of ``k_dim`` finite numbers of 16 bits, by what they are."""
    ones = [1.0] * k_dim
    right = _text(ones)
    return {
        "empty": "",
        "one letter": "A",
        "no base64": "?" * len(right),
        "of another alphabet": "-_" * (len(right) // 2),
        "with a blank": " " + right,
        "with a line's end": right + "\n",
        "with more behind it": right + "AAAA",
        "with padding too much": right + "=",
        "padding alone": "=" * len(right),
        "with a NUL": right + "\0",
        "of letters beyond ASCII": "\uff21" * len(right),
        "of JSON": "[{,}]" * 1000,
        "one number short": _text(ones[1:]),
        "one number long": _text([*ones, 1.0]),
        "of 32 bits": _text(ones, "<f4"),
        "hexadecimal": np.array(ones, dtype="<f2").tobytes().hex(),
        "NaN": _text([np.nan, *ones[1:]]),
        "infinite": _text([np.inf, *ones[1:]]),
        "minus infinite": _text([*ones[1:], -np.inf]),
        "as long as may be": "A" * 65_536,
    }


def convicted(url: str, order: dict[str, Any]) -> dict[str, float]:
    """Seconds to the verdict on each garbage, which is always a mismatch."""
    found = {}
    with httpx.Client(base_url=url, timeout=30.0) as http:
        for name, text in garbage(order["params"]["k_dim"]).items():
            claim = {"nonce": 1, "vector_b64": text}
            body = {**order, "nonces": [1], "wait": True, "validation": {"artifacts": [claim]}}
            began = time.perf_counter()
            answer = http.post(f"{POW}/generate", json=body)
            found[name] = time.perf_counter() - began
            assert answer.status_code == 200, (name, answer.text[:1000])
            assert answer.json()["mismatch_nonces"] == [1], name
    return found
