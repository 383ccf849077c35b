"""What contract tests look at: the sources and signatures of the installed vLLM."""

import inspect

import vllm


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def since(*minor: int) -> bool:
    """Whether the installed vLLM is of this minor version or a newer one."""
    return minor <= vllm.__version_tuple__[:2]


def in_order(text: str, *parts: str) -> bool:
    places = [text.find(part) for part in parts]
    return -1 not in places and places == sorted(places)
