"""The open benchmark: one JSON file for each deployment, in a folder (``deployments/README.md``).

A file is one that `proofserve verify` reads, with what the deployment is beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from proofserve.protocol import default_k_dim
from proofserve.protocol.codec import decode
from proofserve.reports import ReportedError, read_json
from proofserve.verifier.claims import ClaimedArtifacts, Selection, read_file

FOLDER: Final = Path(__file__).parent / "deployments"


class Facts(BaseModel):
    """What a deployment is: ``honest`` if it computes with the weights that ``model`` names."""

    model: str
    weights: str
    honest: bool
    published: str = ""
    source: str


class _File(BaseModel):
    deployment: Facts
    ran_on: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Deployment:
    """``vectors`` float32 [width] by nonce; ``card`` is None where nothing says it."""

    name: str
    facts: Facts
    title: str
    card: str | None
    claimed: ClaimedArtifacts
    vectors: dict[int, NDArray[np.float32]]


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Deployments that proved the same nonces of one model: ``vectors`` float64 [k, n, width]."""

    model: str
    block_hash: str
    deployments: tuple[Deployment, ...]
    vectors: NDArray[np.float64]

    @property
    def honest(self) -> tuple[int, ...]:
        return tuple(i for i, each in enumerate(self.deployments) if each.facts.honest)

    @property
    def cheap(self) -> tuple[int, ...]:
        return tuple(i for i, each in enumerate(self.deployments) if not each.facts.honest)

    @property
    def cheap_weights(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.deployments[i].facts.weights for i in self.cheap))

    def serving(self, weights: str) -> list[int]:
        return [i for i in self.cheap if self.deployments[i].facts.weights == weights]


def read(file: Path) -> Deployment:
    """Raises ReportedError, which names the file and the field, for anything else."""
    said = read_json(file, _File)
    claimed = read_file(file, Selection())
    width = claimed.width or default_k_dim(claimed.scheme or "")
    vectors = {each.nonce: decode(each.vector_b64, width) for each in claimed.claims}
    name, card = said.ran_on.get("name", file.stem), said.ran_on.get("processor")
    return Deployment(
        file.stem, said.deployment, str(name), str(card) if card else None, claimed, vectors
    )


def groups(folders: list[Path]) -> list[Group]:
    """Those of all files in ``folders`` that are about the same model and nonces.

    Raises ReportedError for a folder without files, and for a group with less than two deployments.
    """
    files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
    if not files:
        raise ReportedError(
            f"no deployment in {', '.join(map(str, folders))}: they are files NAME.json"
        )
    found: dict[tuple[object, ...], list[Deployment]] = {}
    for each in map(read, files):
        of = each.claimed
        work = (of.block_hash, of.public_key, of.scheme, of.width, of.seq_len)
        found.setdefault((each.facts.model, *work), []).append(each)
    return [_group(together) for together in found.values() if len(together) > 1]


def _group(together: list[Deployment]) -> Group:
    common = sorted(set.intersection(*(set(each.vectors) for each in together)))
    vectors = np.array([[each.vectors[nonce] for nonce in common] for each in together])
    first = together[0]
    return Group(
        first.facts.model, first.claimed.block_hash, tuple(together), vectors.astype(np.float64)
    )
