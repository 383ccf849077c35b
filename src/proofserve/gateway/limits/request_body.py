"""The fields of a request body that the gateway reads; the backend reads all of them."""

import re
from typing import Annotated

import msgspec

# Tokens reserved for an answer if the request has no limit.
USUAL_ANSWER = 1024
UNLIMITED = (None, None, None)
# Bytes of a conversation that choose the backend, for its prefix cache.
PREFIX_BYTES = 1024
# The beginning of a list of texts, or of a list of lists of tokens.
_LIST = re.compile(rb'\[\s*(["\[])')
# Larger than any real limit. Python cannot print a product of numbers with thousands of digits.
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class RequestFields(msgspec.Struct, gc=False):
    """The fields that decide where a request goes and what it may cost.

    The prompt stays raw JSON: it is passed on, never read.
    """

    model: str | None = None
    stream: bool | None = False
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None
    n: Count | None = 1
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()

    def most_tokens(self, size: int) -> int:
        """The most tokens that a body of ``size`` bytes may cost.

        No token is shorter than a byte. Each endpoint has its own name for the limit and ignores
        the other names, so the largest counts. A negative limit, which backends refuse, counts 0.
        """
        limits = (self.max_completion_tokens, self.max_tokens, self.max_output_tokens)
        first, second, third = limits
        named = max(0, first or 0, second or 0, third or 0)
        longest = USUAL_ANSWER if limits == UNLIMITED else named
        return size + longest * max(1, self.n or 1) * (self._prompts() if self.prompt else 1)

    def _prompts(self) -> int:
        kind = _LIST.match(self.prompt)
        if kind is None:
            # A text, or a list of numbers, which is one prompt in tokens.
            return 1
        # Counted, not parsed: parsing ten million short prompts takes seconds and a gigabyte.
        text = bytes(self.prompt)
        if kind[1] == b"[":
            return text.count(b"[") - 1
        # Two quotes for each prompt, besides escaped ones. A pair of backslashes escapes nothing.
        text = text.replace(rb"\\", b"")
        return (text.count(b'"') - text.count(rb"\"")) // 2

    def beginning(self, length: int = PREFIX_BYTES) -> bytes:
        """The first bytes of the conversation: requests that share them share a prefix cache."""
        return bytes(self.messages or self.prompt or self.input)[:length]


class RequestBodyReader:
    """Reads bodies. Raises ValueError with a message for the client that names the wrong field."""

    def __init__(self) -> None:
        # Not strict, because backends also accept "8" as a number.
        self._decoder = msgspec.json.Decoder(RequestFields, strict=False)

    def read(self, body: bytes | bytearray) -> RequestFields:
        if not body:
            raise ValueError("The request body is empty.")
        try:
            return self._decoder.decode(body)
        except RecursionError as error:
            raise ValueError("The request body is nested too deeply.") from error
        except msgspec.ValidationError as error:
            raise ValueError(f"The request body has a wrong value: {error}.") from error
        except ValueError as error:
            raise ValueError(f"The request body is not valid JSON: {error}.") from error
