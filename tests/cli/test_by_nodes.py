"""``verify --reference`` on vectors that real GPUs published, and beside nodes over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.challenged import NAME, OPERATOR, VALIDATOR, ChallengedNode, ModelEngine, challenged_node
from proofserve.cli.main import app
from proofserve.engines.reference.kernels import PROFILES, with_kernels
from proofserve.engines.reference.network import load
from proofserve.engines.reference.suspects import suspect
from proofserve.lab.node_client import NodeClient
from proofserve.lab.owed import Unproved, UnprovedError, Withheld
from proofserve.lab.records import Work
from proofserve.lab.report import LabError, write_json
from proofserve.protocol import SKETCH_2
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.claims import ClaimedArtifacts, document
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.members import judged_by_members
from proofserve.verifier.nodes.sources import NodeSource, asked
from proofserve.verifier.verification import claims_of_vectors
from real_gpus.deployments import FOLDER
from support.four_bits import one_thread
from support.reference import Prover

H100, B200, A100 = (f"05-minimax-m27-fp8-{each}" for each in ("4xh100", "2xb200", "4xa100"))
HONEST, SAME = "04-minimax-m27-fp8-2xb200", "05-minimax-m27-fp8-2xh200"
AWQ, OTHER_AWQ = "04-minimax-m27-awq4bit-2xb200", "04-minimax-m27-awq4bit-2xh100"
LANE = ("--lane", "0:1")


def path(name: str) -> str:
    return str(FOLDER / f"{name}.json")


def beside(*names: str) -> tuple[str, ...]:
    return tuple(text for name in names for text in ("--reference", path(name)))


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


SEVERAL = beside(H100, B200, A100)


def test_an_honest_deployment_is_cleared_without_weights() -> None:
    result = verify(path(HONEST), *SEVERAL, *LANE, "--suspect-node", f"awq={path(AWQ)}")
    assert result.exit_code == 0, result.output
    assert "nearest to" in result.output
    assert "all ruled out on 30% of the nonces" in result.output
    assert "forges 50% of its nonces or more, if it is then twice as far away" in result.output


@pytest.mark.parametrize("suspect", [(), ("--suspect-node", f"awq={path(OTHER_AWQ)}")])
def test_one_of_four_bits_is_convicted(suspect: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = verify(path(AWQ), *SEVERAL, *suspect, *LANE, "--json", str(file))
    assert result.exit_code == 1, result.output
    report = json.loads(file.read_text())
    assert report["verdict"] == "fraud"
    assert report["nonces_used"] <= 64
    tests = {each["test"]: each for each in report["findings"]}
    if suspect:
        assert tests["suspects"]["result"] == "fraud"
        assert "errors lean to awq" in tests["suspects"]["text"]
    else:
        assert tests["nearness"]["figures"]["times_as_far"] > 1.4


def test_without_the_lane_artifacts_of_32_bits_are_not_cleared() -> None:
    result = verify(path(HONEST), *SEVERAL)
    assert result.exit_code == 2, result.output
    assert "artifact-v1 is cleared only where the lane is known" in result.output


def test_equal_bits_with_a_reference_clear(tmp_path: Path) -> None:
    result = verify(_copy(H100, tmp_path), *SEVERAL, *LANE)
    assert result.exit_code == 0, result.output
    assert "equal bits in 20 of 20 nonces" in result.output
    assert "bits are equal to those of 05-minimax-m27-fp8-4xh100.json" in result.output


def test_another_release_is_neither_convicted_nor_cleared() -> None:
    k26 = beside(*(f"05-kimi-k26-int4-2x8xh100-{each}" for each in ("tp16-b16", "tp16-b32")))
    third = beside("05-kimi-k26-4xb200-b200-k5-kimi-1")
    result = verify(path("04-kimi-k25-int4-4xb200"), *k26, *third, *LANE, "--nonces", "300")
    assert result.exit_code == 2, result.output
    assert "an honest node may be 1.75 times as far" in result.output


def test_two_references_clear_nothing_and_convict_by_a_suspect_alone() -> None:
    two = beside(H100, B200)
    result = verify(path(HONEST), *two, *LANE)
    assert result.exit_code == 2, result.output
    assert "distances decide nothing beside two references: give 3" in result.output
    suspects = ("--suspect-node", f"awq={path(OTHER_AWQ)}")
    assert verify(path(AWQ), *two, *suspects, *LANE).exit_code == 1


def test_a_reference_that_cheats_is_named_and_clears_nothing() -> None:
    result = verify(path(HONEST), *beside(H100, B200, AWQ), *LANE)
    assert result.exit_code == 2, result.output
    assert f"{AWQ}.json (2 x B200) is odd among the references" in result.output
    # What is near to it, too.
    assert verify(path(OTHER_AWQ), *beside(H100, B200, AWQ), *LANE).exit_code == 2


def test_beside_one_kind_of_card_nothing_convicts() -> None:
    b200 = beside("04-minimax-m27-fp8-2xb200", "04-minimax-m27-fp8-2xb200-triton", B200)
    suspects = ("--suspect-node", f"awq={path(AWQ)}")
    result = verify(path(OTHER_AWQ), *b200, *suspects, *LANE)
    assert result.exit_code == 2, result.output
    said = result.output.replace("\n", " ")
    for each in ("distance", "direction"):
        assert f"no {each} convicts, as the references name no two kinds of card" in said


# -- what is wrong is named, and is no fraud -------------------------------------------------------


def _copy(name: str, folder: Path, **changes: Any) -> str:
    """The file, with other fields; None leaves one out."""
    body = json.loads((FOLDER / f"{name}.json").read_text()) | changes
    file = folder / f"changed-{name}.json"
    file.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_hash": "another"}, "block_hash: expected is artifact_collection_block_v1"),
        ({"public_key": "another"}, "public_key: expected is artifact_collection_pk_v1"),
        ({"scheme": "sketch-v1"}, "scheme sketch-v1|--scheme artifact-v1 contradicts the source"),
        ({"seq_len": 256}, "--seq-len 1024 contradicts the source, which says 256"),
        ({"k_dim": 24}, "--k-dim 12 contradicts the source, which says 24"),
        ({"artifacts": []}, "0 nonces are common"),
    ],
)
def test_a_reference_about_other_work_is_named(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = _copy(SAME, tmp_path, **changes)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", file, *LANE)
    assert result.exit_code == 3, result.output
    assert any(each in result.output.replace("\n", " ") for each in said.split("|")), result.output


def test_a_vector_that_is_none_is_named(tmp_path: Path) -> None:
    rows = json.loads((FOLDER / f"{SAME}.json").read_text())["artifacts"]
    # 0x7e00 is not a number in float16.
    rows[3] = {"nonce": 3, "vector_b64": "AH4" + rows[3]["vector_b64"][3:]}
    file = _copy(SAME, tmp_path, artifacts=rows)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", file, *LANE)
    assert result.exit_code == 3, result.output
    assert f"changed-{SAME}.json: nonce 3" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (beside(H100), "give two nodes or files at least"),
        (beside(H100, H100), "is given twice, and is one witness"),
        (beside(H100, HONEST), "is the node that is judged"),
        ((*SEVERAL, "--test", "direction"), "--test does not go with --reference: give --model"),
        ((*SEVERAL, "--model", ".", "--plan"), "--plan does not go with --reference: leave one"),
        ((*SEVERAL, "--model", ".", "--suspect-node", "a=b"), "give the checkpoint as --suspect"),
        ((*SEVERAL, "--suspect-node", "awq.json"), "give NAME=URL or NAME=FILE"),
        (("--suspect-node", f"a={path(AWQ)}"), "give two nodes or files at least"),
        ((*SEVERAL, "--reference", "/nowhere.json"), "cannot read /nowhere.json"),
        ((*SEVERAL, "--reference", "http://127.0.0.1:9"), "the reference http://127.0.0.1:9, not"),
    ],
)
def test_options_that_cannot_be_are_named(arguments: tuple[str, ...], said: str) -> None:
    result = verify(path(HONEST), *arguments, *LANE)
    assert result.exit_code == 3, result.output
    assert said in result.output.replace("\n", " ")


def test_one_deployment_under_two_names_is_one_witness(tmp_path: Path) -> None:
    again = _copy(H100, tmp_path)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", again, *LANE)
    assert result.exit_code == 3, result.output
    assert "equal bits in 64 of 64 nonces" in result.output.replace("\n", " ")


def test_references_that_often_have_equal_bits_are_one_witness(tmp_path: Path) -> None:
    """Beside three such, hardly apart, an honest node of another card would be far."""
    rows = json.loads((FOLDER / f"{H100}.json").read_text())["artifacts"]
    other = json.loads((FOLDER / f"{SAME}.json").read_text())["artifacts"]
    mixed = [one if i % 3 else two for i, (one, two) in enumerate(zip(rows, other, strict=True))]
    again = _copy(H100, tmp_path, artifacts=mixed)
    result = verify(path(HONEST), *beside(H100, B200), "--reference", again, *LANE)
    assert result.exit_code == 3, result.output
    assert "they are one witness" in result.output.replace("\n", " ")


def test_a_reference_that_does_not_say_its_card_counts_as_no_other_kind(tmp_path: Path) -> None:
    silent = _copy(A100, tmp_path, ran_on=None)
    result = verify(path(AWQ), *beside(H100, SAME), "--reference", silent, *LANE)
    assert result.exit_code == 2, result.output
    assert "the references name no two kinds of card" in result.output.replace("\n", " ")


def test_a_verdict_by_files_needs_neither_torch_nor_much_memory() -> None:
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from typer.testing import CliRunner\n"
        "from proofserve.cli.main import app\n"
        f"result = CliRunner().invoke(app, {['verify', path(HONEST), *SEVERAL, *LANE]!r})\n"
        "loaded = {'torch', 'transformers', 'vllm', 'matplotlib'} & set(sys.modules)\n"
        "said = Path('/proc/self/status').read_text()\n"
        "most = int(re.search(r'VmHWM:\\s+(\\d+) kB', said)[1]) // 1024\n"
        "print(result.exit_code, sorted(loaded), most)\n"
    )
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    exit_code, rest = ran.stdout.split(" ", 1)
    assert (exit_code, rest.rpartition(" ")[0]) == ("0", "[]")
    assert int(rest.rpartition(" ")[2]) < 300


# -- nodes over HTTP -------------------------------------------------------------------------------

KERNELS = (*("vLLM on x86 with bfloat16", "torch", "vLLM on a GPU"), "vLLM on x86 with AMX")


@pytest.fixture(scope="module")
def nodes(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ChallengedNode]]:
    """A node for each of ``KERNELS``, and for weights that are rounded to 4 and 8 bits."""
    with one_thread(), ExitStack() as stack:
        found = {}
        for name in (*KERNELS, "int4 g128", "int8 per channel"):
            folder = tmp_path_factory.mktemp("node")
            found[name] = stack.enter_context(challenged_node(tiny, folder, f"one of {name}"))
            _serve(found[name].engine, tiny, name)
        yield found


def _serve(engine: ModelEngine, model: Path, name: str) -> None:
    published = load(model, "float32", "cpu")
    if name in PROFILES:
        engine.serves = Prover(with_kernels(published, PROFILES[name]))
    else:
        cheap = with_kernels(suspect(published, name), PROFILES[KERNELS[0]])
        engine.serves = Prover(cheap)


def references(nodes: dict[str, ChallengedNode]) -> tuple[str, ...]:
    asked = [text for each in KERNELS[:3] for text in ("--reference", nodes[each].url)]
    return (*asked, "--reference-api-key", OPERATOR)


def claims_of(node: ChallengedNode, folder: Path) -> str:
    """A file of what it computes of short inputs."""
    order = Work(NAME, block_hash="block", seq_len=8, k_dim=64, scheme=SKETCH_2)
    with NodeClient(node.url, OPERATOR) as client:
        claims = client.artifacts(order, range(64))
    file = folder / "claims.json"
    write_json(file, document(order, claims))
    return str(file)


def test_a_node_is_judged_by_three_others(nodes: dict[str, ChallengedNode], tmp_path: Path) -> None:
    suspects = ("--suspect-node", f"int8={nodes['int8 per channel'].url}")
    honest = verify(claims_of(nodes[KERNELS[3]], tmp_path), *references(nodes), *suspects)
    assert honest.exit_code == 0, honest.output
    assert "asking http" in honest.output
    four = verify(claims_of(nodes["int4 g128"], tmp_path), *references(nodes))
    assert four.exit_code == 1, four.output
    eight = claims_of(nodes["int8 per channel"], tmp_path)
    assert verify(eight, *references(nodes), *suspects).exit_code == 1


def test_a_challenge_has_others_compute_the_same_nonces(nodes: dict[str, ChallengedNode]) -> None:
    options = ("--nonces", "24", "--deadline", "600", "--api-key", VALIDATOR)
    asked = ["challenge", nodes["int4 g128"].url, *references(nodes), *options]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1, result.output
    assert "24 nonces" in result.output


def test_a_reference_that_fails_gives_no_verdict(
    nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    engine, file = nodes[KERNELS[1]].engine, claims_of(nodes[KERNELS[3]], tmp_path)
    engine.not_finite = frozenset(range(64))
    try:
        result = verify(file, *references(nodes))
    finally:
        engine.not_finite = frozenset()
    assert result.exit_code == 3, result.output
    assert nodes[KERNELS[1]].url in result.output


# -- beside a checkpoint ---------------------------------------------------------------------------


def weighed(tiny: Path, source: str, *reference: str) -> tuple[Result, Any]:
    """``verify`` with the checkpoint, and its report."""
    file = Path(source).with_name("report.json")
    keys = ("--reference-api-key", OPERATOR, "--json", str(file))
    named = [text for each in reference for text in ("--reference", each)]
    result = verify(source, "--model", str(tiny), *named, *keys)
    return result, json.loads(file.read_text()) if file.exists() else None


def test_a_reference_is_judged_by_the_checkpoint_first(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    mine, cheap = nodes[KERNELS[0]], nodes["int8 per channel"]
    result, report = weighed(tiny, claims_of(nodes[KERNELS[2]], tmp_path), mine.url, cheap.url)
    assert result.exit_code == 0, result.output
    first, second, *tests = report["findings"]
    assert (first["test"], first["result"]) == ("reference", "honest")
    assert (first["figures"]["name"], first["figures"]["left_out"]) == (mine.url, "False")
    assert (second["result"], second["figures"]["left_out"]) == ("fraud", "True")
    assert "is left out: errors" in second["text"]
    assert {each["test"] for each in tests} == {"paired", "direction", "footprint"}
    assert report["threshold_from"].endswith(
        f"trusted: {mine.url} (vLLM none, one of {KERNELS[0]}, bfloat16)"
    )


def test_a_reference_that_cheats_clears_none_of_its_kind(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    cheap = nodes["int8 per channel"]
    # Its very bits.
    result, report = weighed(tiny, claims_of(cheap, tmp_path), cheap.url)
    assert result.exit_code == 1, result.output
    assert report["threshold_from"].endswith("trusted: none")


def test_equal_bits_with_a_reference_clear_beside_a_checkpoint(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    mine = nodes[KERNELS[0]]
    result, report = weighed(tiny, claims_of(mine, tmp_path), mine.url)
    assert result.exit_code == 0, result.output
    assert [each["test"] for each in report["findings"]] == ["reference", "exact"]
    assert "equal bits in 20 of 20 nonces" in result.output


def test_a_reference_that_serves_another_checkpoint_is_named(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    source = claims_of(nodes[KERNELS[0]], tmp_path)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(json.loads(Path(source).read_text()) | {"weights_digest": "f00d"}))
    result, _ = weighed(tiny, source, str(other))
    assert result.exit_code == 3, result.output
    assert "weights_digest: the reference other.json: it serves f00d" in result.output


def test_a_challenge_asks_a_reference_beside_the_checkpoint(
    tiny: Path, nodes: dict[str, ChallengedNode]
) -> None:
    options = ("--nonces", "24", "--deadline", "600", "--api-key", VALIDATOR)
    mine = ("--reference", nodes[KERNELS[0]].url, "--reference-api-key", OPERATOR)
    asked = ["challenge", nodes["int4 g128"].url, "--model", str(tiny), *mine, *options]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1, result.output
    assert "reference undecided" in result.output or "reference honest" in result.output


# -- members of a fleet ----------------------------------------------------------------------------


def judged(
    nodes: dict[str, ChallengedNode],
    name: str,
    *others: str,
    as_if: str | None = None,
    withheld: Withheld | None = None,
) -> VerdictReport:
    """The member ``name`` beside others; it may say of itself what ``as_if`` says."""
    order = Work(NAME, block_hash="block", seq_len=8, k_dim=64, scheme=SKETCH_2)
    member = asked(NodeSource(name, nodes[name].url, OPERATOR), order, range(48))
    if as_if is not None:
        other = asked(NodeSource(as_if, nodes[as_if].url, OPERATOR), order, range(48))
        member = replace(member, facts=other.facts)
    claims = claims_of_vectors(member.vectors)
    claimed = ClaimedArtifacts(
        "block", "lab-key", tuple(range(48)), tuple(claims), 128, 8, SKETCH_2
    )
    claimed = replace(claimed, withheld=withheld)
    urls = {"away": "http://127.0.0.1:9"} | {each: of.url for each, of in nodes.items()}
    sources = [NodeSource(f"{i} {each}", urls[each], OPERATOR) for i, each in enumerate(others)]
    return judged_by_members(claimed, order, member, sources, JudgingOptions(), "a seed")


def said(report: VerdictReport) -> str:
    return " ".join(each.text for each in report.outcome.opinions)


def test_the_odd_one_of_four_members_is_found_without_a_trusted_node(
    nodes: dict[str, ChallengedNode],
) -> None:
    cheap = judged(nodes, "int4 g128", *KERNELS[:3])
    assert cheap.outcome.verdict is SequentialResult.FRAUD
    honest = judged(nodes, KERNELS[0], *KERNELS[1:3], "int4 g128")
    assert honest.outcome.verdict is SequentialResult.UNDECIDED
    assert "int4 g128 (vLLM none, one of int4 g128, bfloat16) is odd among" in said(honest)
    # A member that is down is left out.
    assert (
        judged(nodes, KERNELS[3], *KERNELS[:3], "away").outcome.verdict is SequentialResult.HONEST
    )


def test_two_against_two_convict_nobody_and_say_why(nodes: dict[str, ChallengedNode]) -> None:
    for name, *others in (
        (KERNELS[0], KERNELS[1], "int4 g128", "int4 g128"),
        ("int4 g128", "int4 g128", *KERNELS[:2]),
        (KERNELS[0], KERNELS[0], "int4 g128", "int4 g128"),
    ):
        found = judged(nodes, name, *others)
        assert found.outcome.verdict is SequentialResult.UNDECIDED, name
        assert "of 3 other members" in said(found) or "is odd among" in said(found)


def test_members_that_are_alike_clear_each_other_by_their_bits(
    nodes: dict[str, ChallengedNode],
) -> None:
    found = judged(nodes, KERNELS[0], KERNELS[0], KERNELS[0], "int4 g128")
    assert found.outcome.verdict is SequentialResult.HONEST
    assert said(found) == "its bits are those of 2 of 3 other members"
    assert found.outcome.nonces_used == 48
    # Half is not most.
    assert (
        judged(nodes, "int4 g128", "int4 g128", *[KERNELS[0]] * 2).outcome.verdict
        is SequentialResult.UNDECIDED
    )


def test_who_says_that_it_is_as_most_and_has_other_bits_has_not_proved(
    nodes: dict[str, ChallengedNode],
) -> None:
    alike = [KERNELS[0]] * 3
    with pytest.raises(UnprovedError, match="as 3 other members, which have equal bits") as raised:
        judged(nodes, "int4 g128", *alike, as_if=KERNELS[0])
    assert raised.value.kind is Unproved.OTHER_BITS
    # Another card may have other bits, and one kind of witness does not show how far it may be.
    other = judged(nodes, "int4 g128", *alike)
    assert other.outcome.verdict is SequentialResult.UNDECIDED
    assert "1 of these differ: distances need 3 that do" in said(other)


def test_a_member_that_withheld_a_part_is_not_cleared_by_bits(
    nodes: dict[str, ChallengedNode],
) -> None:
    withheld = Withheld(Unproved.UNDELIVERED, "2 nonces")
    found = judged(nodes, *[KERNELS[0]] * 4, withheld=withheld)
    assert found.outcome.verdict is SequentialResult.UNPROVED


def test_one_other_member_is_too_few(nodes: dict[str, ChallengedNode]) -> None:
    with pytest.raises(LabError, match="1 of 2 other members answered, and two are needed: the"):
        judged(nodes, KERNELS[0], KERNELS[1], "away")
