"""Bodies as JSON: the standard's and UTF-8, nested a little, and with no more values than asked.

Python's own parser also takes UTF-16, byte order marks and halves of surrogate pairs, and holds the
event loop up for seconds while it makes millions of small objects.
"""

import json
import re
from contextlib import suppress
from typing import Any

import numpy as np
from fastapi import Request
from pydantic_core import from_json

# Every value but the first of its list or object has a comma before it.
_COMMA, _LIST, _OBJECT, _QUOTE = b',[{"'
# So many bytes at a time: temporary arrays stay small, and what is too much is soon known.
_SLICE = 2**20
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


class StrictRequest(Request):
    """A request whose body is read strictly. NaN and its kin pass: the fields decide on them."""

    async def json(self) -> Any:
        """What the body says. Raises JSONDecodeError, whatever is wrong with it."""
        body = await self.body()
        try:
            return from_json(body)
        except ValueError as error:
            if _HALF_OF_A_PAIR.search(body):
                # Python's parser lets it pass, and the field that has it is then refused by name.
                with suppress(ValueError, RecursionError):
                    return json.loads(body.decode())
            raise json.JSONDecodeError(str(error), "", 0) from error


def holds_more_values(body: bytes, most: int) -> bool:
    """Whether ``body`` holds more than ``most`` values as JSON; told without parsing it.

    What its strings say does not count: a claim may be of any text.
    """
    if len(body) <= most:
        return False
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    data = np.frombuffer(body, np.uint8)
    values = quotes = 0
    for start in range(0, data.size, _SLICE):
        part = data[start : start + _SLICE]
        begins = (part == _COMMA) | (part == _LIST) | (part == _OBJECT)
        borders = np.flatnonzero(part == _QUOTE)
        if borders.size:
            quotes_before = np.searchsorted(borders, np.flatnonzero(begins)) + quotes
            values += int(np.count_nonzero(quotes_before % 2 == 0))
            quotes += borders.size
        elif quotes % 2 == 0:
            values += int(np.count_nonzero(begins))
        if values > most or quotes > 2 * most:
            return True
    return False
