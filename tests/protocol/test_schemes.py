import dataclasses
import json

import pytest

from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.network_schemes import ArtifactScheme, DistanceScheme
from proofserve.protocol.schemes import SCHEMES, from_wire, scheme


def test_the_schemes_are_the_networks_and_our_own() -> None:
    assert SCHEMES == ("distance-v1", "artifact-v1", "artifact-v1-layers", "sketch-v1", "sketch-v2")


@pytest.mark.parametrize("name", SCHEMES)
def test_a_name_alone_gives_the_defaults(name: str) -> None:
    assert scheme(name).name == name
    assert from_wire({"name": name}) == scheme(name)


def test_the_defaults() -> None:
    assert scheme("distance-v1") == DistanceScheme(sign_flips=True, layer_hooks=False)
    assert scheme("artifact-v1") == ArtifactScheme(12, layer_reflections=False)
    assert scheme("artifact-v1-layers") == ArtifactScheme(12, layer_reflections=True)


@pytest.mark.parametrize(
    "recipe",
    [
        DistanceScheme(),
        DistanceScheme(sign_flips=False, layer_hooks=True),
        ArtifactScheme(k_dim=7),
        ArtifactScheme(layer_reflections=True, stronger_rng=True),
    ],
)
def test_a_scheme_survives_the_wire(recipe: DistanceScheme | ArtifactScheme) -> None:
    assert from_wire(json.loads(json.dumps(recipe.to_wire()))) == recipe


def test_a_scheme_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        scheme("artifact-v1").k_dim = 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("wire", [{}, {"name": "artifact-v2"}, {"name": None}, {"name": ["a"]}])
def test_an_unknown_name_is_refused(wire: dict[str, object]) -> None:
    with pytest.raises(ProtocolError, match=r"^scheme: .* is (none of|not the name of)"):
        from_wire(wire)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("artifact-v1", "sign_flips", True),
        ("artifact-v1", "layer_reflections", True),
        ("artifact-v1", "stronger_rng", True),
        ("artifact-v1", "k_dim", True),
        ("artifact-v1", "k_dim", 12.0),
        ("artifact-v1", "k_dim", 0),
        ("artifact-v1-layers", "stronger_rng", 1),
        ("distance-v1", "sign_flips", "yes"),
        ("distance-v1", "k_dim", 12),
    ],
)
def test_an_improper_option_is_named(name: str, option: str, value: object) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_wire({"name": name, option: value})
    assert caught.value.field == option
