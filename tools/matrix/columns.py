"""A version of vLLM on one of its model runners, and the environment that its processes need."""

import os
from dataclasses import dataclass

from matrix.installation import installed
from matrix.vectors import SCHEMES
from measuring.files import ROOT
from proofserve.engines.vetting.features import VETTED, Runner
from proofserve.models.trained import MIXTURE
from proofserve.settings.process import variable

# Versions whose second model runner can run on a CPU, through Triton's interpreter.
INTERPRETED = ("0.32", "0.33")
INTERPRETER = ROOT / "tests" / "support" / "triton_on_cpu"
FIRST_RUNNER, SECOND_RUNNER = (
    {"VLLM_USE_V2_MODEL_RUNNER": second, "TRITON_INTERPRET": second} for second in ("0", "1")
)
# Versions whose build for CPUs chooses experts inside a kernel: sketch-v2 of a mixture is refused.
WITHOUT_EXPERTS = ("0.26", "0.29")


@dataclass(frozen=True, slots=True)
class Column:
    """``skipped`` says why it does not run; empty if it does."""

    minor: str
    runner: Runner
    skipped: str = ""

    @property
    def name(self) -> str:
        return f"{self.minor}-{self.runner}"

    @property
    def models(self) -> tuple[str, ...]:
        """Those whose vectors it proves."""
        return tuple(m for m in SCHEMES if m != MIXTURE.name or self.minor not in WITHOUT_EXPERTS)

    def variables(self) -> dict[str, str]:
        """What its processes have in their environment beside ours.

        Installs the version the first time (a minute).
        """
        runner = SECOND_RUNNER if self.runner == "V2" else FIRST_RUNNER
        own = [installed(self.minor), INTERPRETER if self.runner == "V2" else None]
        path = [*(str(each) for each in own if each), variable("PYTHONPATH")]
        return {**runner, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def columns() -> list[Column]:
    """Every column, those of runners that are not vetted yet as skipped."""
    made = []
    for row in VETTED:
        made += [Column(row.minor, runner) for runner in row.runners]
        if "V2" not in row.runners and row.minor in INTERPRETED:
            why = "proofs on this runner are not in the table of vetted versions"
            made.append(Column(row.minor, "V2", why))
    return made
