"""Requests that a small model answers, and among them every kind that passes a gateway."""

from typing import Any

from support.node import NAME

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "big": {"type": "boolean"},
    },
    "required": ["city", "big"],
    "additionalProperties": False,
}
IN_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


def chat(tokens: int, about: object = "rivers", **changes: Any) -> dict[str, Any]:
    """A request whose answer has exactly so many tokens, always the same."""
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": f"Tell me about {about}."}],
        "max_tokens": tokens,
        "temperature": 0,
        "seed": 7,
        "ignore_eos": True,
        **changes,
    }


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (CHAT, chat(16)),
    # Short, since vLLM may put any two tokens into one event: see what compares the bytes.
    "stream": (CHAT, chat(4, stream=True)),
    "stream with usage": (CHAT, chat(4, stream=True, stream_options={"include_usage": True})),
    "several choices": (CHAT, chat(4, n=2)),
    "no tool": (CHAT, chat(16, tools=[WEATHER], tool_choice="none")),
    "schema": (CHAT, chat(40, response_format=IN_SCHEMA, ignore_eos=False)),
    "schema stream": (CHAT, chat(6, response_format=IN_SCHEMA, ignore_eos=False, stream=True)),
    "other fields": (CHAT, chat(8, made_up={"deep": [1, "ü", None]})),
    "refused": (CHAT, chat(8, temperature=-1)),
    "no messages": (CHAT, {"model": NAME}),
    "completion": (
        "/v1/completions",
        {"model": NAME, "prompt": "Rivers", "max_tokens": 8, "temperature": 0},
    ),
}
