"""What ``verify`` and ``challenge`` compare with in place of weights: nodes that are trusted."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from proofserve.reports import ReportedError
from proofserve.verifier.nodes.judging import TrustedNodes
from proofserve.verifier.nodes.sources import NodeSource, named

# Options that references have no part in, and those that need a checkpoint.
_ALONE: Final = ("dist_threshold", "recompute_url", "engine", "plan")
_ABOUT_WEIGHTS: Final = ("calibration", "test", "suspect")


def given_nodes(
    references: Sequence[str] | None,
    suspects: Sequence[str] | None,
    api_key: str | None,
    options: Mapping[str, Any],
    judged: Collection[str | None],
) -> TrustedNodes | None:
    """By what a command was given, None without a node; ``judged`` are the judged one's places.

    Raises ReportedError for options that do not go together, too few references, and for a node
    that would judge itself.
    """
    references, suspects = references or (), suspects or ()
    if not (references or suspects):
        return None
    _require_together(references, suspects, options)
    cheats = []
    for text in suspects:
        name, _, place = text.partition("=")
        if not (name and place):
            raise ReportedError(f"--suspect-node {text}: give NAME=URL or NAME=FILE")
        cheats.append(NodeSource(name, place, api_key))
    nodes = TrustedNodes(tuple(named(place, api_key) for place in references), tuple(cheats))
    nodes.require_apart(judged)
    return nodes


def _require_together(
    references: Sequence[str], suspects: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raises ReportedError as ``given_nodes``."""
    has_model = bool(options.get("model"))
    wrong = _ALONE if has_model else (*_ABOUT_WEIGHTS, *_ALONE)
    if used := next((name for name in wrong if options.get(name)), None):
        why = "give --model too" if used in _ABOUT_WEIGHTS else "leave one of the two out"
        raise ReportedError(f"--{used.replace('_', '-')} does not go with --reference: {why}")
    if has_model and suspects:
        raise ReportedError(
            "--suspect-node does not go with --model: give the checkpoint as --suspect"
        )
    if not has_model and len(references) < 2:
        raise ReportedError(
            "--reference: give two nodes or files at least, as one has no other to be near;"
            " beside --model one is enough"
        )
