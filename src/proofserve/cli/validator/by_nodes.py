"""What ``verify`` and ``challenge`` compare with in place of weights: nodes that are trusted."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from proofserve.lab.records import Work
from proofserve.lab.report import LabError, Progress
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.beside_checkpoint import judged_beside_checkpoint
from proofserve.verifier.nodes.judging import judged_by_nodes
from proofserve.verifier.nodes.sources import NONCES, NodeSource, witnesses_of
from proofserve.verifier.verification import Truth

# Options that references have no part in, and those that need a checkpoint.
_ALONE: Final = ("dist_threshold", "recompute_url", "engine", "plan")
_ABOUT_WEIGHTS: Final = ("calibration", "test", "suspect")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Nodes and files that are trusted, ``references``, and such that cheat, ``suspects``."""

    references: tuple[NodeSource, ...]
    suspects: tuple[NodeSource, ...]

    @classmethod
    def given(
        cls,
        references: Sequence[str] | None,
        suspects: Sequence[str] | None,
        api_key: str | None,
        options: Mapping[str, Any],
        judged: Collection[str | None],
    ) -> Self | None:
        """By what a command was given, None without a node; ``judged`` are the judged one's places.

        Raises LabError for options that do not go together, too few references, and for a node that
        would judge itself.
        """
        references, suspects = references or (), suspects or ()
        if not (references or suspects):
            return None
        _require_together(references, suspects, options)
        named = [NodeSource(_name_of(place), place, api_key) for place in references]
        for text in suspects:
            name, _, place = text.partition("=")
            if not (name and place):
                raise LabError(f"--suspect-node {text}: give NAME=URL or NAME=FILE")
            named.append(NodeSource(name, place, api_key))
        places = [each.place for each in named]
        if own := next((place for place in places if place in judged), None):
            raise LabError(f"--reference: {own} is the node that is judged, and no witness of it")
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise LabError(f"--reference: {twice} is given twice, and is one witness")
        return cls(tuple(named[: len(references)]), tuple(named[len(references) :]))

    def report(
        self,
        claimed: ClaimedArtifacts,
        order: Work,
        options: JudgingOptions,
        sample: tuple[str, int | None],
        line: Progress,
        truth: Truth | None = None,
    ) -> VerdictReport:
        """The verdict; ``sample`` is the seed that draws it, and how many nonces it has at most.

        ``truth`` is a checkpoint's, None without one. Raises LabError, ProtocolError, WitnessError
        for a reference that does not answer, and the errors of our own recomputation.
        """
        seed, most = sample
        drawn = seed, NONCES if most is None else most
        known = witnesses_of(claimed, order, self.references, self.suspects, drawn, line)
        if truth is None:
            return judged_by_nodes(claimed, known, options, seed)
        return judged_beside_checkpoint(claimed, known, truth, options, seed, line)


def _require_together(
    references: Sequence[str], suspects: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raises LabError as ``given``."""
    has_model = bool(options.get("model"))
    wrong = _ALONE if has_model else (*_ABOUT_WEIGHTS, *_ALONE)
    if used := next((name for name in wrong if options.get(name)), None):
        why = "give --model too" if used in _ABOUT_WEIGHTS else "leave one of the two out"
        raise LabError(f"--{used.replace('_', '-')} does not go with --reference: {why}")
    if has_model and suspects:
        raise LabError("--suspect-node does not go with --model: give the checkpoint as --suspect")
    if not has_model and len(references) < 2:
        raise LabError(
            "--reference: give two nodes or files at least, as one has no other to be near;"
            " beside --model one is enough"
        )


def _name_of(place: str) -> str:
    """A URL, or the name of a file."""
    return place if "://" in place else Path(place).name
