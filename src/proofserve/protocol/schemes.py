"""The schemes by name: the network's (protocol P.1), and our own (``docs/native.md``)."""

from collections.abc import Callable, Mapping
from functools import partial

from proofserve.protocol import ARTIFACT, ARTIFACT_LAYERS, DISTANCE, SKETCH, SKETCH_2
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.network_schemes import ArtifactScheme, DistanceScheme
from proofserve.protocol.scheme import Scheme
from proofserve.protocol.sketch import SketchScheme

_Builder = tuple[Callable[..., Scheme], Mapping[str, type]]

_ARTIFACT_OPTIONS: Mapping[str, type] = {"k_dim": int, "stronger_rng": bool}
_BUILDERS: Mapping[str, _Builder] = {
    DISTANCE: (DistanceScheme, {"sign_flips": bool, "layer_hooks": bool}),
    ARTIFACT: (ArtifactScheme, _ARTIFACT_OPTIONS),
    ARTIFACT_LAYERS: (partial(ArtifactScheme, layer_reflections=True), _ARTIFACT_OPTIONS),
    SKETCH: (SketchScheme, {"k_dim": int}),
    SKETCH_2: (partial(SketchScheme, seeded_experts=True), {"k_dim": int}),
}

SCHEMES = tuple(_BUILDERS)


def scheme(name: str, **options: object) -> Scheme:
    """The scheme of that name; options that are left out take their defaults.

    Raises ProtocolError for ``scheme``, the name, and for an option, by its name, that the scheme
    does not have, that has the wrong type, or that it refuses.
    """
    if name not in _BUILDERS:
        raise ProtocolError("scheme", f"{name!r} is none of {', '.join(SCHEMES)}")
    build, kinds = _BUILDERS[name]
    for option, value in options.items():
        if option not in kinds:
            raise ProtocolError(option, f"{name} has no such option")
        # Exact types: True is an int, and 1 would pass for a flag.
        if type(value) is not kinds[option]:
            raise ProtocolError(option, f"{value!r} is not of type {kinds[option].__name__}")
    return build(**options)


def from_wire(wire: Mapping[str, object]) -> Scheme:
    """The scheme that ``Scheme.to_wire`` described; errors as in ``scheme``."""
    options = dict(wire)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ProtocolError("scheme", f"{name!r} is not the name of a scheme")
    return scheme(name, **options)
