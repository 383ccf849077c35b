"""The example of docs/offline.md with chat beside it, in a process of its own.

vLLM keeps its settings for a process's life. Usage: sync_engine.py MODEL, with the example as
module ``offline_example`` on the path; prints what happened as one line of JSON.
"""

import importlib
import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

from proofserve.rounds.records import ProofBatch


def main(model: str) -> dict[str, Any]:
    prove = importlib.import_module("offline_example").prove
    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=1024)
    engine = llm.llm_engine
    before = prove(llm, range(8))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    engine.add_request("chat", {"prompt_token_ids": list(range(200, 240))}, sampling)
    during = []
    while engine.has_unfinished_requests():
        during.append(type(prove(llm, range(8))).__name__)
        engine.step()
    after = prove(llm, range(8))
    assert isinstance(before, ProofBatch)
    assert isinstance(after, ProofBatch)
    gauges = engine.engine_core.engine_core.proofserve_gauges()
    return {
        "values": before.values.tolist(),
        "same_afterwards": before.values.tolist() == after.values.tolist(),
        "during": during,
        "leased_blocks": gauges["leased_blocks"],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
