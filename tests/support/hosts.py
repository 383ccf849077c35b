"""A host that has everything: a card, vLLM, and proofserve as its plugin."""

from proofserve_lab.facts import Card, HostFacts, TorchFacts

CARD = Card("NVIDIA H200", 139.8, 138.0, "9.0")
HOST = HostFacts(
    python="3.12.3",
    cores=16,
    memory_gib=128.0,
    available_gib=120.0,
    torch=TorchFacts("2.11.0", "13.0", (CARD,)),
    driver_cards=("NVIDIA H200, 580.1",),
    transformers="5.17.0",
    vllm="0.32.0",
    plugin=True,
    missing=(),
)
