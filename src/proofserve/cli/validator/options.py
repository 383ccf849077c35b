"""Groups of options that several commands of a validator share, each declared once."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import Field

from proofserve.cli.command import CommandOptions, Device, ForwardBatch, Json
from proofserve.client.judging import Judging
from proofserve.reports import ReportedError, write_json
from proofserve.verifier.calibration_file import NETWORK_P_MISMATCH, CalibrationFile
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.judging import JudgingOptions
from proofserve.verifier.nodes.judging import TrustedNodes
from proofserve.verifier.nodes.sources import NodeSource, named

# Options that trusted nodes have no part in, and those that need a checkpoint.
_ALONE: Final = ("dist_threshold", "recompute_url", "engine", "plan")
_ABOUT_WEIGHTS: Final = ("calibration", "test", "suspect")


class CheckpointOptions(CommandOptions):
    panel = "The recomputation"

    suspect: tuple[Path, ...] = ()
    """A checkpoint that a cheating node may serve, beside the bank of suspects."""
    device: Device = "cpu"


class RecomputationOptions(CheckpointOptions):
    forward_batch: ForwardBatch = 8

    def judging(
        self, model: Path | None, nodes: TrustedNodes | None, options: JudgingOptions
    ) -> Judging:
        return Judging(model, nodes, options, self.device, self.suspect, self.forward_batch)


class CalibrationOptions(CommandOptions):
    panel = "Honest nodes"

    calibration: Path | None = None
    """A file of `calibrate noise --out`; it must be of this model."""

    def measured(self) -> CalibrationFile | None:
        """Raises ReportedError naming the field that is wrong."""
        return CalibrationFile.read(self.calibration) if self.calibration else None


class ThresholdOptions(CalibrationOptions):
    dist_threshold: float | None = None
    """L2 distance beyond which a vector is a mismatch, measured for this model."""
    p_mismatch: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of honest vectors beyond the threshold;"
        f" the calibration's, or {NETWORK_P_MISMATCH} with --dist-threshold.",
    )


class ChanceOptions(CommandOptions):
    panel = "The verdict"

    alpha: float = ALPHA
    """Chance to convict an honest node."""
    beta: float = BETA
    """Chance to clear a fraudulent node."""


class ProofChanceOptions(ChanceOptions):
    share: float = SHARE
    """Clear only if a node that forges this share would have shown."""


class ReportOptions(CommandOptions):
    panel = "Output"

    json_file: Json = None

    def write(self, content: object) -> None:
        """Write the figures if there is a file for them. Raises OSError."""
        if self.json_file is not None:
            write_json(self.json_file, content)


class PageOptions(ReportOptions):
    html: Path | None = None
    """Write the report as a web page to this file."""

    def write_page(self, page: Callable[[], str]) -> None:
        """Drawing a page takes seconds: only if there is a file for it. Raises OSError."""
        if self.html is not None:
            self.html.write_text(page(), encoding="utf-8")


class PlanOptions(CommandOptions):
    panel = "Output"

    # Eager: what only a plan can do without asks whether it is one.
    plan: Annotated[bool, typer.Option("--plan", is_eager=True)] = False
    """Only say what it will cost here: bytes, memory, time. Writes nothing; a model's config.json
    will do."""


def needed_without_plan(ctx: typer.Context, value: str | None) -> str | None:
    if value is None and not ctx.params["plan"]:
        raise typer.BadParameter("it is missing, and only --plan needs none")
    return value


class WitnessOptions(CommandOptions):
    """A checkpoint, nodes in its place or beside it, and the evidence of what they say."""

    panel = "Judges and evidence"

    model: Path | None = None
    """The checkpoint that it claims to serve."""
    reference: tuple[str, ...] = ()
    """A node or a file of one that you trust, two or more, in the place of --model."""
    suspect_node: tuple[str, ...] = ()
    """NAME=URL or NAME=FILE: a node of yours that cheats so; with --reference."""
    reference_api_key: Annotated[str | None, typer.Option(envvar="POC_REFERENCE_API_KEY")] = None
    """A key of those nodes."""
    bundle: Path | None = None
    """Write the verdict with the node's signed answers, for `verify-bundle` by others."""

    def nodes(self, judged: Collection[str | None]) -> TrustedNodes | None:
        """None if none is given; ``judged`` are the places of the node that is judged.

        Raises ReportedError for options that do not go together, too few references, and for a node
        that would judge itself.
        """
        if not (self.reference or self.suspect_node):
            return None
        self._require_together()
        cheats = []
        for text in self.suspect_node:
            name, _, place = text.partition("=")
            if not (name and place):
                raise ReportedError(f"--suspect-node {text}: give NAME=URL or NAME=FILE")
            cheats.append(NodeSource(name, place, self.reference_api_key))
        references = (named(place, self.reference_api_key) for place in self.reference)
        nodes = TrustedNodes(tuple(references), tuple(cheats))
        nodes.require_apart(judged)
        return nodes

    def _require_together(self) -> None:
        has_model = self.model is not None
        wrong = _ALONE if has_model else (*_ABOUT_WEIGHTS, *_ALONE)
        if used := next((name for name in wrong if getattr(self, name, None)), None):
            why = "give --model too" if used in _ABOUT_WEIGHTS else "leave one of the two out"
            raise ReportedError(f"--{used.replace('_', '-')} does not go with --reference: {why}")
        if has_model and self.suspect_node:
            raise ReportedError(
                "--suspect-node does not go with --model: give the checkpoint as --suspect"
            )
        if not has_model and len(self.reference) < 2:
            raise ReportedError(
                "--reference: give two nodes or files at least, as one has no other to be near;"
                " beside --model one is enough"
            )
        if has_model and self.bundle is not None:
            raise ReportedError(
                "--bundle: it holds a verdict by --model or by --reference, not by both"
            )
