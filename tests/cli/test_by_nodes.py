"""``verify --reference`` and ``challenge --reference`` beside nodes over HTTP."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cli.bundled import forged
from cli.challenged import NAME, OPERATOR, VALIDATOR, ChallengedNode, ModelEngine, challenged_node
from proofserve.cli.main import app
from proofserve.cli.validator import challenge
from proofserve.engines.reference.kernels import PROFILES
from proofserve.engines.reference.network import load, with_kernels
from proofserve.engines.reference.suspects import suspect
from proofserve.protocol import SKETCH_2
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError, Withheld
from proofserve.remote.records import Work
from proofserve.reports import ReportedError, write_json
from proofserve.verifier.bundle import BundledWitness, UnsignedError
from proofserve.verifier.claims import ClaimedArtifacts, document
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.members import judged_by_members
from proofserve.verifier.nodes.sources import NodeSource, asked
from proofserve.verifier.verification import claims_of_vectors
from support.four_bits import one_thread
from support.reference import Prover


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify", *arguments])


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


@pytest.fixture
def short_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of challenges, for which 256 tokens would be usual."""
    usual = challenge.calibrated_order
    monkeypatch.setattr(
        challenge, "calibrated_order", lambda measured: replace(usual(measured), seq_len=32)
    )


@pytest.mark.usefixtures("short_inputs")
def test_a_challenge_has_others_compute_the_same_nonces(nodes: dict[str, ChallengedNode]) -> None:
    options = ("--nonces", "24", "--deadline", "600", "--api-key", VALIDATOR)
    asked = ["challenge", nodes["int4 g128"].url, *references(nodes), *options]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 1, result.output
    assert "24 nonces" in result.output


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.mark.usefixtures("short_inputs")
def test_a_verdict_by_others_is_computed_again_from_what_all_of_them_signed(
    nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    file, options = tmp_path / "verdict.json", ("--nonces", "24", "--deadline", "600")
    bundled = (*options, "--api-key", VALIDATOR, "--bundle", file)
    made = run("challenge", nodes["int4 g128"].url, *references(nodes), *bundled)
    assert made.exit_code == 1, made.output
    checked = run("verify-bundle", file, "--check-only")
    assert checked.exit_code == 0, checked.output
    shown = "".join(checked.output.split())
    bundle = json.loads(file.read_text())
    for each in bundle["witnesses"]:
        assert f"trusted:{each['url']},signedby{each['public_key']}" in shown
    again = run("verify-bundle", file)
    assert again.exit_code == 1, again.output
    assert "So does another sample" in again.output
    assert run("verify-bundle", file, "--model", tmp_path).exit_code == 3

    def fault(**changes: Any) -> str:
        found = run("verify-bundle", forged(file, tmp_path / "forged.json", **changes))
        assert found.exit_code == 3, found.output
        return " ".join(found.output.split())

    first, *others = bundle["witnesses"]
    answers = [*first["answers"][:-1], first["answers"][-1] | {"body": "{}"}]
    assert "is not signed by the node's key" in fault(
        witnesses=[first | {"answers": answers}, *others]
    )
    assert "findings: {" in fault(witnesses=[first, others[0]])
    # A node is no witness of itself.
    itself = first | {"public_key": bundle["public_key"], "answers": bundle["answers"]}
    assert "signs with the key of another node here" in fault(witnesses=[itself, *others])


def test_a_bundle_has_one_kind_of_judge(nodes: dict[str, ChallengedNode], tmp_path: Path) -> None:
    asked = ("challenge", nodes["int4 g128"].url, *references(nodes), "--model", tmp_path)
    assert "not by both" in run(*asked, "--bundle", tmp_path / "verdict.json").output
    of_file = NodeSource("theirs", str(tmp_path / "theirs.json"))
    with pytest.raises(UnsignedError, match="says is not signed"):
        BundledWitness.of(of_file, is_suspect=False)


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


@pytest.mark.usefixtures("few_kernels")
def test_a_reference_is_judged_by_the_checkpoint_first(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    mine, cheap = nodes[KERNELS[0]], nodes["int8 per channel"]
    result, report = weighed(tiny, claims_of(nodes[KERNELS[2]], tmp_path), mine.url, cheap.url)
    assert result.exit_code == 0, result.output
    first, second, *tests = report["findings"]
    assert (first["test"], first["result"]) == ("reference", "honest")
    assert (first["figures"]["name"], first["figures"]["left_out"]) == (mine.url, False)
    assert (second["result"], second["figures"]["left_out"]) == ("fraud", True)
    assert "is left out: errors" in second["text"]
    assert {each["test"] for each in tests} == {"paired", "direction", "footprint"}
    assert report["threshold_from"].endswith(
        f"trusted: {mine.url} (vLLM none, one of {KERNELS[0]}, bfloat16)"
    )


@pytest.mark.usefixtures("few_kernels")
def test_a_reference_that_cheats_clears_none_of_its_kind(
    tiny: Path, nodes: dict[str, ChallengedNode], tmp_path: Path
) -> None:
    cheap = nodes["int8 per channel"]
    # Its very bits.
    result, report = weighed(tiny, claims_of(cheap, tmp_path), cheap.url)
    assert result.exit_code == 1, result.output
    assert report["threshold_from"].endswith("trusted: none")


@pytest.mark.usefixtures("few_kernels")
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


@pytest.mark.usefixtures("few_kernels", "short_inputs")
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
    with pytest.raises(
        ReportedError, match="1 of 2 other members answered, and two are needed: the"
    ):
        judged(nodes, KERNELS[0], KERNELS[1], "away")
