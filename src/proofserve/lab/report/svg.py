"""Pictures of web pages, as SVG."""

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH: Final = 9.0
"""Inches, of all pictures."""


def drawn(panels: Sequence[Callable[["Axes"], None]], height: float) -> str:
    """One picture with ``panels`` side by side, ``height`` in inches."""
    # Only commands that draw wait for this import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
