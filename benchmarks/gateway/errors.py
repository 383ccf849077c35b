"""The two ways in which a run cannot go as asked."""


class Unusable(RuntimeError):
    """Nothing can be measured here: the text says what is missing or wrong."""


class Skipped(RuntimeError):
    """One contestant cannot take part: the text says why. The others still can."""
