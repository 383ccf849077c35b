"""Claims whose vectors are texts that are not base64 vectors: the node must give a verdict.

If the node answered 422, a prover that publishes garbage could not be convicted.
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
    """Texts that are not a vector of ``k_dim`` finite float16 numbers, by a description."""
    ones = [1.0] * k_dim
    right = _text(ones)
    return {
        "empty": "",
        "one letter": "A",
        "not base64": "?" * len(right),
        "the URL-safe alphabet": "-_" * (len(right) // 2),
        "a space in front": " " + right,
        "a newline at the end": right + "\n",
        "more text at the end": right + "AAAA",
        "too much padding": right + "=",
        "only padding": "=" * len(right),
        "a NUL at the end": right + "\0",
        "letters outside ASCII": "\uff21" * len(right),
        "JSON": "[{,}]" * 1000,
        "one number too few": _text(ones[1:]),
        "one number too many": _text([*ones, 1.0]),
        "float32": _text(ones, "<f4"),
        "hexadecimal": np.array(ones, dtype="<f2").tobytes().hex(),
        "NaN": _text([np.nan, *ones[1:]]),
        "infinite": _text([np.inf, *ones[1:]]),
        "minus infinite": _text([*ones[1:], -np.inf]),
        "the longest allowed text": "A" * 65_536,
    }


def seconds_to_convict(url: str, order: dict[str, Any]) -> dict[str, float]:
    """Seconds until the verdict on each garbage text; assert that each one is a mismatch."""
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
