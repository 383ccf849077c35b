"""Texts from members and targets, as both databases can hold them."""


def kept(text: str, most: int = 500) -> str:
    """The first ``most`` characters. PostgreSQL stores no NUL, no database half a surrogate."""
    return text[:most].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def kept_if(text: str | None) -> str | None:
    return None if text is None else kept(text)
