"""Bodies as JSON: the standard's and UTF-8, nested a little, and with no more values than asked.

Python's own parser also takes UTF-16, byte order marks and halves of surrogate pairs, and holds the
event loop up for seconds while it makes millions of small objects.
"""

import json
import re
from typing import Any

from fastapi import Request
from pydantic_core import from_json

# Every value but the first of its list or object has a comma before it.
_BEGINNINGS = (b",", b"[", b"{")
# One that does not end goes on to the end: to look for its end from within would take for ever.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


class StrictRequest(Request):
    """A request whose body is read strictly. NaN and its kin pass: the fields decide on them."""

    async def json(self) -> Any:
        """What the body says. Raises JSONDecodeError, whatever is wrong with it."""
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


def holds_more_values(body: bytes, most: int) -> bool:
    """Whether ``body`` holds more than ``most`` values as JSON; told without parsing it."""
    if _values(body) <= most:
        return False
    # A claim may be of any text: what its strings say must not decide on a request.
    bare, strings = _STRING.subn(b"", body, most + 1)
    return strings > most or _values(bare) > most


def _values(text: bytes) -> int:
    return sum(map(text.count, _BEGINNINGS))
