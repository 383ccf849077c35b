"""The models on which verdicts are tried, and the nonces of each."""

from dataclasses import dataclass
from typing import Final

from matrix.columns import IN_VENV, Column
from measuring.files import CACHE
from proofserve.cli.model import Checkpoint, SmallModel, checkpoint
from proofserve.models.trained import DENSE, MIXTURE, SMOLLM2
from proofserve.protocol import ARTIFACT, SEQ_LEN, SKETCH, SKETCH_2, default_k_dim
from proofserve.protocol.identity import Block
from proofserve.remote.records import Work
from proofserve.rounds.records import Workload
from proofserve.verifier.audit.deployment import PRUNED_EXPERTS
from proofserve.verifier.orders import workload_of
from soundness.massive import MASSIVE, massive_checkpoint

FOLDER: Final = CACHE / "soundness"
SCHEMES: Final = (SKETCH, ARTIFACT)
# Of a dense model both sketches are the same numbers.
MIXTURE_SCHEMES: Final = (SKETCH, SKETCH_2, ARTIFACT)
# The round of recorded vectors. The calibrations that the package ships are of another one.
BLOCK, KEY = Block("0xabc", 100), "me"
FORWARD_BATCH: Final = 8
# The environment of a server with the second model runner.
SECOND_SERVER: Final = Column(IN_VENV, "V2").variables()

# Besides the bank.
DENSE_CHEATS: Final = ("int8 g48, private", "int8 per channel by chance")
MIXTURE_CHEATS: Final = (
    *("int4 g128", "fp8 per channel", "int8 per channel", "int8 g32"),
    *PRUNED_EXPERTS,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the package: ``arch`` in its ``what``, and the cheats that serve it.

    If ``serves_bank``, each suspect of the bank is one, too. A node is judged on the first
    ``nonces``, ``at_once`` in a forward. The model's calibration is the one that the package
    ships, or else of as many as ``calibrating`` after these, ``bank`` of them with suspects.
    """

    arch: str
    what: str
    cheats: tuple[str, ...] = ()
    seq_len: int = 64
    nonces: int = 64
    calibrating: int = 128
    bank: int = 64
    schemes: tuple[str, ...] = SCHEMES
    serves_bank: bool = False
    at_once: int = FORWARD_BATCH

    @property
    def model(self) -> Checkpoint:
        if self.arch == MASSIVE:
            return Checkpoint(MASSIVE, massive_checkpoint(FOLDER / "models"))
        return Checkpoint(self.arch, checkpoint(SmallModel(self.arch)))

    @property
    def is_recorded(self) -> bool:
        """Whether nodes of other machines and of other shapes were recorded, too."""
        return self.arch == DENSE.name

    @property
    def judged(self) -> tuple[int, ...]:
        return tuple(range(self.nonces))

    @property
    def calibrated(self) -> tuple[int, ...]:
        return tuple(range(self.nonces, self.nonces + self.calibrating))

    def workload(self, scheme: str) -> Workload:
        return workload_of(self.order(scheme))

    def order(self, scheme: str) -> Work:
        """The same work, as a node gets it."""
        return Work(
            self.arch,
            block_hash=BLOCK.hash,
            block_height=BLOCK.height,
            public_key=KEY,
            seq_len=self.seq_len,
            k_dim=default_k_dim(scheme),
            scheme=scheme,
        )


SUBJECTS: Final = (
    Subject(DENSE.name, "dense, trained", DENSE_CHEATS, SEQ_LEN, nonces=128, serves_bank=True),
    Subject(
        MIXTURE.name,
        "mixture of 16 experts, 4 a token, trained",
        tuple(PRUNED_EXPERTS),
        SEQ_LEN,
        schemes=MIXTURE_SCHEMES,
        serves_bank=True,
    ),
    # A forward takes a second, so there are few nonces.
    Subject(
        SMOLLM2.name,
        "dense, published, 135 million weights",
        seq_len=SEQ_LEN,
        nonces=24,
        schemes=(SKETCH_2,),
        serves_bank=True,
    ),
    Subject(
        "qwen3_moe",
        "mixture of 32 experts, 4 a token, seeded",
        MIXTURE_CHEATS,
        schemes=MIXTURE_SCHEMES,
    ),
    Subject(
        "gpt_oss",
        "mixture of 8 experts, 2 a token, seeded",
        MIXTURE_CHEATS,
        schemes=MIXTURE_SCHEMES,
    ),
    Subject("deepseek_v3", "mixture with latent attention (MLA), seeded", schemes=MIXTURE_SCHEMES),
    Subject(MASSIVE, "dense, with massive activations, seeded"),
    Subject("gemma3", "dense, with sliding windows, seeded"),
    Subject("qwen3", "dense, seeded"),
)
BY_NAME: Final = {subject.arch: subject for subject in SUBJECTS}
