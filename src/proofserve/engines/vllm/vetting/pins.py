"""A name of vLLM that proofserve relies on, and the search for names that are gone."""

from collections.abc import Iterable
from dataclasses import dataclass

from proofserve.engines.vllm.vetting.sources import Sources


@dataclass(frozen=True, slots=True)
class Name:
    """``name`` in ``module``, and what it must have.

    Args:
        module: a module of vLLM.
        name: dotted, within the module; empty for the module itself.
        has: parameters of a function, or members of a class: methods, fields and attributes that
            its methods set on ``self``. Members that it inherits belong to the class they are
            defined in.
    """

    module: str
    name: str
    has: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """A name that our function ``used_by`` relies on, in the spelling of the newest version.

    ``used_by``: ``module.function``, below ``engines.vllm`` or ``proofserve``. ``older``: what
    older versions have in its place, if that differs; they have all of it.
    """

    used_by: str
    module: str
    name: str
    has: tuple[str, ...] = ()
    older: tuple[Name, ...] = ()

    @property
    def newest(self) -> Name:
        return Name(self.module, self.name, self.has)


@dataclass(frozen=True, slots=True)
class Feature:
    """What an operator loses with any of ``pins``; ``name`` completes "needed by …"."""

    name: str
    pins: tuple[Pin, ...]


def moved(features: Iterable[Feature], sources: Sources) -> list[str]:
    """A line for each pin that does not hold: what is gone, and which feature relied on it."""
    return [
        f"{_text(pin.newest, sources)}, needed by {feature.name} ({pin.used_by})"
        for feature in features
        for pin in feature.pins
        if not holds(pin, sources)
    ]


def holds(pin: Pin, sources: Sources) -> bool:
    """Whether the sources have one of the spellings of ``pin``."""
    spellings = [(pin.newest,), pin.older] if pin.older else [(pin.newest,)]
    return any(
        all(sources.missing(each.module, each.name, each.has) == () for each in names)
        for names in spellings
    )


def _text(name: Name, sources: Sources) -> str:
    place = ".".join(filter(None, (name.module, name.name)))
    gone = sources.missing(name.module, name.name, name.has)
    return f"no {place}" if gone is None else f"{place} without {', '.join(gone)}"
