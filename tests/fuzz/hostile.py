"""Hostile bodies: JSON that breaks parsers, and bodies that a careless server would accept.

A ``Form`` is a valid body of a route with the types of its fields; each family makes bodies of it.
Some fields are written as text, because Python's JSON module would refuse or repair them.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

JSON = "application/json"
MILLION = 10**6


class Hostile(NamedTuple):
    """One body, its name, and its header lines."""

    name: str
    body: bytes
    content_type: str | None = JSON
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A body that its route accepts, and the names of its fields by type.

    ``lists`` hold a number for each nonce. ``reads_all``: the route refuses unknown fields and does
    not pass them on. ``takes_claims``: the body may hold vectors beside its nonces.
    """

    order: dict[str, Any]
    texts: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    reads_all: bool = True
    takes_claims: bool = False

    def plain(self) -> bytes:
        return json.dumps(self.order).encode()

    def put(self, field: str, text: bytes) -> bytes:
        """The body with ``text``, unchanged, as the value of a known or unknown field."""
        others = {name: value for name, value in self.order.items() if name != field}
        rest = json.dumps(others).encode().removeprefix(b"{")
        return b"{%s: %s%s%s" % (json.dumps(field).encode(), text, b", " if others else b"", rest)


# -- not JSON --------------------------------------------------------------------------------------

NOT_JSON = [
    b"",
    b" ",
    b"{",
    b"}",
    b"[",
    b'"',
    b"{]",
    b"nul",
    b"undefined",
    b"True",
    b"'a'",
    b"{'a': 1}",
    b"{a: 1}",
    b'{"a" 1}',
    b'{"a": }',
    b'{"a": 1,}',
    b'{"a": 1 "b": 2}',
    b'{"a": [1,]}',
    b'{"a": 01}',
    b'{"a": +1}',
    b'{"a": .5}',
    b'{"a": 1.}',
    b'{"a": 1e}',
    b'{"a": 0x10}',
    b'{"a": 1_000}',
    b'{"a": --1}',
    b'{"a": "\\x41"}',
    b'{"a": "\\u12"}',
    b'{"a": "\\u{41}"}',
    b'{"a": "\n"}',
    b'{"a": "\x00"}',
    b'{"a": "b',
    b"// a\n{}",
    b"/* a */ {}",
    b"\x0b{}",
    b"\xc2\xa0{}",
    b"\x00{}",
    b"<order><nonces/></order>",
    b"a: 1\nb: 2\n",
    b"a=1&b=2",
    b"\x80\x04}q\x00.",
    b"\x81\xa1a\x01",
    b"\xa1aa\x01",
    b"GET / HTTP/1.1\r\n\r\n",
]
NOT_AN_ORDER = [
    b"[]",
    b"[[]]",
    b"null",
    b"true",
    b"0",
    b"-0.0",
    b'""',
    b'"order"',
    b"[null]",
    b"[{}]",
]


def not_json(form: Form) -> Iterator[Hostile]:
    for text in NOT_JSON:
        yield Hostile(f"not JSON: {text[:20]!r}", text)
    for text in NOT_AN_ORDER:
        yield Hostile(f"not an order: {text!r}", text)
    plain = form.plain()
    for end in (1, len(plain) // 3, len(plain) // 2, len(plain) - 1):
        yield Hostile(f"cut off after {end} bytes", plain[:end])
    yield Hostile("in a string", json.dumps(plain.decode()).encode())
    yield Hostile("in a list", b"[" + plain + b"]")
    yield Hostile("twice", plain + plain)
    yield Hostile("twice, in lines", plain + b"\n" + plain)
    for rest in (b"\x00", b"x", b"}", b","):
        yield Hostile(f"{rest!r} after the end", plain + rest)


# -- depth -----------------------------------------------------------------------------------------


def deep(form: Form) -> Iterator[Hostile]:
    for depth in (10_000, 100_000, MILLION):
        for kind, opening, inner, closing in (
            ("lists", b"[", b"", b"]"),
            ("objects", b'{"a":', b"0", b"}"),
            ("both", b'[{"a":', b"0", b"}]"),
        ):
            whole = opening * depth + inner + closing * depth
            yield Hostile(f"{depth} {kind}", whole)
            yield Hostile(f"{depth} {kind} without an end", opening * depth)
            yield Hostile(f"{depth} {kind} in an unknown field", form.put("unknown", whole))


# -- numbers ---------------------------------------------------------------------------------------

HUGE = {
    "1e19": b"1" + b"0" * 19,
    "1e30": b"1" + b"0" * 30,
    "-1e30": b"-1" + b"0" * 30,
    "400 digits": b"9" * 400,
    "4000 digits": b"9" * 4000,
    "5000 digits": b"9" * 5000,
    "a million digits": b"9" * MILLION,
    "minus 4000 digits": b"-" + b"9" * 4000,
}
NOT_FINITE = {
    "NaN": b"NaN",
    "Infinity": b"Infinity",
    "-Infinity": b"-Infinity",
    "1e999": b"1e999",
    "-1e999": b"-1e999",
    "1e-1 of a million digits": b"0." + b"1" * MILLION,
}
NOT_A_NUMBER = {"half": b"0.5", "a text": b'"x"', "a list": b"[]", "an object": b"{}"}


def numbers(form: Form) -> Iterator[Hostile]:
    for field in form.integers:
        for name, text in (HUGE | NOT_FINITE | NOT_A_NUMBER).items():
            yield Hostile(f"{field} is {name}", form.put(field, text))
    for field in form.numbers:
        for name, text in (NOT_FINITE | NOT_A_NUMBER).items():
            if name not in ("half", "1e-1 of a million digits"):
                yield Hostile(f"{field} is {name}", form.put(field, text))


# -- text ------------------------------------------------------------------------------------------

NOT_A_TEXT = {
    "a high surrogate": rb'"\ud800"',
    "a low surrogate": rb'"\udc00"',
    "surrogates in the wrong order": rb'"\udc00\ud800"',
    "a high surrogate before a letter": rb'"\ud800a"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "a pair of them in UTF-8": b'"\xed\xa0\x80\xed\xb0\x80"',
    "an overlong NUL": b'"\xc0\x80"',
    "a byte that is never UTF-8": b'"\xff"',
    "beyond Unicode": b'"\xf5\x80\x80\x80"',
    "half a letter": b'"\xe2\x82"',
    "Latin-1": b'"caf\xe9"',
    "a NUL": b'"a\x00b"',
    "a number": b"7",
    "a list": b'["x"]',
    "an object": b'{"x": "y"}',
    "a yes": b"true",
}
TOO_LONG = {
    "a million letters": b'"' + b"x" * MILLION + b'"',
    "a million escapes": b'"' + rb"\u0041" * MILLION + b'"',
    "a million letters of three bytes": b'"' + "語".encode() * MILLION + b'"',
}


def texts(form: Form) -> Iterator[Hostile]:
    for field in form.texts:
        for name, text in NOT_A_TEXT.items():
            yield Hostile(f"{field} is {name}", form.put(field, text))
    for field in form.texts[:1]:
        for name, text in TOO_LONG.items():
            yield Hostile(f"{field} is {name}", form.put(field, text))


# -- keys ------------------------------------------------------------------------------------------


def keys(form: Form) -> Iterator[Hostile]:
    plain = form.plain().removeprefix(b"{")
    for name, key in (
        ("half a pair", rb'"\ud800"'),
        ("a NUL", b'"\x00"'),
        ("a number", b"1"),
        ("null", b"null"),
        ("a list", b"[]"),
    ):
        yield Hostile(f"a key is {name}", b"{%s: 1, %s" % (key, plain))
    for field in form.integers[:1] + form.texts[:1]:
        # Most parsers, ours too, take the last value of a repeated key.
        wrong = b", %s: {}}" % json.dumps(field).encode()
        yield Hostile(f"{field} twice", form.plain().removesuffix(b"}") + wrong)
        again = form.plain().removesuffix(b"}") + wrong.removesuffix(b"}") * 10_000
        yield Hostile(f"{field} 10,000 times", again + b"}")
    if not form.reads_all:
        return
    half = b'{"\xed\xa0\x80": 1, '
    yield Hostile("a key is half a pair in UTF-8", half + plain)
    for name in ("", "__proto__", "constructor", "\0", "k" * MILLION, "ключ"):
        yield Hostile(f"an unknown key: {name[:20]!r}", form.put(name, b"1"))
    for many in (1000, 100_000):
        unknown = json.dumps({f"k{number}": 0 for number in range(many)}).encode()
        yield Hostile(f"{many} keys", unknown.removesuffix(b"}") + b", " + plain)


# -- encodings -------------------------------------------------------------------------------------

ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-8-sig", "cp037")


def encodings(form: Form) -> Iterator[Hostile]:
    for name in ENCODINGS:
        body = form.plain().decode().encode(name)
        yield Hostile(f"in {name}", body)
        yield Hostile(f"in {name}, and says so", body, f"{JSON}; charset={name}")
    yield Hostile("a bare byte order mark", b"\xef\xbb\xbf")


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 9, mtime=0),
    "deflate": zlib.compress,
    "raw deflate": _raw_deflate,
    "gzip in gzip": lambda data: gzip.compress(gzip.compress(data, 9, mtime=0), 9, mtime=0),
}


def bombs(form: Form) -> Iterator[Hostile]:
    """Small bodies that unpack to 20 MB."""
    contents = {
        "an order": form.plain(),
        "20 MB of blanks and an order": b" " * (20 * MILLION) + form.plain(),
        "20 MB of NUL": bytes(20 * MILLION),
    }
    for kind, pack in PACKERS.items():
        said = f"Content-Encoding: {kind.split()[-1]}"
        for what, data in contents.items():
            packed = pack(data)
            yield Hostile(f"{what} as {kind}", packed, lines=(said,))
            yield Hostile(f"{what} as {kind}, without the header", packed)


# -- other kinds of content ------------------------------------------------------------------------

MULTIPART = (
    b'--x\r\ncontent-disposition: form-data; name="order"; filename="order.json"\r\n'
    b"content-type: application/json\r\n\r\n%s\r\n--x--\r\n"
)


def contents(form: Form) -> Iterator[Hostile]:
    plain = form.plain()
    whole = MULTIPART % plain
    yield Hostile("multipart", whole, "multipart/form-data; boundary=x")
    yield Hostile("multipart that says that it is JSON", whole)
    yield Hostile("multipart of 10,000 parts", b"--x\r\n\r\n\r\n" * 10_000)
    yield Hostile("a form", b"order=" + plain, "application/x-www-form-urlencoded")
    if form.reads_all:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml", None):
            yield Hostile(f"an order as {kind}", plain, kind)


# -- many values -----------------------------------------------------------------------------------

ITEMS = {
    "numbers": b"7",
    "huge numbers": b"9" * 20,
    "fractions": b"0.5",
    "NaNs": b"NaN",
    "nulls": b"null",
    "texts": b'"x"',
    "empty lists": b"[]",
    "empty objects": b"{}",
    "objects": b'{"nonce": 1}',
    "nested lists": b"[[[[]]]]",
}


def many_values(form: Form) -> Iterator[Hostile]:
    """A million values where the route expects a few or none."""
    for field in form.lists:
        counted = json.dumps([*range(MILLION)]).encode()
        yield Hostile(f"{field}: the first million", form.put(field, counted))
        for name, item in ITEMS.items():
            yield Hostile(f"{field}: a million {name}", form.put(field, _repeated(item)))
            yield Hostile(f"{field}: one of the {name}", form.put(field, b"[%s, -1]" % item))
    if form.reads_all:
        for name, item in ITEMS.items():
            yield Hostile(
                f"a million {name} in an unknown field", form.put("unknown", _repeated(item))
            )
            yield Hostile(f"a million {name} instead of an order", _repeated(item))


def _repeated(item: bytes) -> bytes:
    return b"[" + (item + b",") * (MILLION - 1) + item + b"]"


# -- claims ----------------------------------------------------------------------------------------

NOT_A_VECTOR_TEXT = {
    "a number": b"7",
    "null": b"null",
    "NaN": b"NaN",
    "a list of numbers": b"[0.5, 0.5]",
    "an object": b'{"base64": "AAAA"}',
    "half a pair": rb'"\ud800"',
    "a byte that is never UTF-8": b'"\xff"',
    "a NUL": b'"AAAA\x00"',
    "a line's end": b'"AAAA\n"',
    "a million letters": b'"' + b"A" * MILLION + b'"',
    "65,540 letters": b'"' + b"A" * 65_540 + b'"',
}
NOT_CLAIMS = {
    "null in a list": b"[null]",
    "texts": b'["AAAA"]',
    "no list": b'{"nonce": 1, "vector_b64": "AAAA"}',
    "none": b"[]",
    "one without a text": b'[{"nonce": 1}]',
    "one without a nonce": b'[{"vector_b64": "AAAA"}]',
    "one of a negative nonce": b'[{"nonce": -1, "vector_b64": "AAAA"}]',
    "one of a huge nonce": b'[{"nonce": 99999999999999999999, "vector_b64": "AAAA"}]',
    "one with more": b'[{"nonce": 1, "vector_b64": "AAAA", "dist": 0}]',
    "one of another nonce": b'[{"nonce": 3, "vector_b64": "AAAA"}]',
    "the same twice": b'[{"nonce": 1, "vector_b64": "AAAA"}, {"nonce": 1, "vector_b64": "AAAA"}]',
}


def claims(form: Form) -> Iterator[Hostile]:
    if not form.takes_claims:
        return

    def claiming(artifacts: bytes) -> bytes:
        return form.put("validation", b'{"artifacts": %s}' % artifacts)

    for name, text in NOT_A_VECTOR_TEXT.items():
        yield Hostile(f"a vector is {name}", claiming(b'[{"nonce": 1, "vector_b64": %s}]' % text))
    for name, artifacts in NOT_CLAIMS.items():
        yield Hostile(f"claims are {name}", claiming(artifacts))
    many = b",".join([b'{"nonce": 1, "vector_b64": "AAAA"}'] * (MILLION // 2))
    yield Hostile("claims are half a million", claiming(b"[%s]" % many))


FAMILIES = (not_json, deep, numbers, texts, keys, encodings, bombs, contents, many_values, claims)


def corpus(form: Form) -> Iterator[Hostile]:
    """Yield every body of every family, one at a time: together they are gigabytes."""
    for family in FAMILIES:
        yield from family(form)
