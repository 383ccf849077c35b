"""What ``verify`` and ``challenge`` compare with in place of weights: nodes that are trusted."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from proofserve.cli.session import CommandSession
from proofserve.lab.records import Work
from proofserve.lab.report import LabError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.judging import judged_by_nodes
from proofserve.verifier.nodes.sources import NONCES, NodeSource, witnesses_of

_ABOUT_WEIGHTS: Final = (
    *("model", "calibration", "dist_threshold", "recompute_url", "engine", "test", "suspect"),
    "plan",
)


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

        Raises LabError for an option that is about weights, and for a node that would judge itself.
        """
        references, suspects = references or (), suspects or ()
        if not (references or suspects):
            return None
        if used := next((name for name in _ABOUT_WEIGHTS if options.get(name)), None):
            option = f"--{used.replace('_', '-')}"
            raise LabError(f"{option} is about weights; with --reference nothing is recomputed")
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
        session: CommandSession,
    ) -> VerdictReport:
        """The verdict; ``sample`` is the seed that draws it, and how many nonces it has at most.

        Raises LabError, ProtocolError, and NodeError for a reference that does not answer.
        """
        seed, most = sample
        drawn = seed, NONCES if most is None else most
        with session.interrupts.allowed():
            known = witnesses_of(
                claimed, order, self.references, self.suspects, drawn, session.line
            )
            return judged_by_nodes(claimed, known, options, seed)


def _name_of(place: str) -> str:
    """A URL, or the name of a file."""
    return place if "://" in place else Path(place).name
