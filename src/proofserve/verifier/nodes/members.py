"""Members of a fleet judged by each other: no node is trusted, but most are taken as honest."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from proofserve.protocol.verdict.comparison import claim_errors
from proofserve.protocol.verdict.nearness import ENOUGH
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.node_client import Unproved, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import ReportedError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import Opinion
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.judging import judged_by_distance, truth_of
from proofserve.verifier.nodes.sources import (
    KnownNode,
    NodeSource,
    WitnessError,
    Witnesses,
    are_alike,
    asked,
    equal_bits,
)
from proofserve.verifier.verification import Verification, nonces_needed, settled


@dataclass(frozen=True, slots=True)
class _Alike:
    """Members that have the same bits in many nonces: one witness, as often as they are."""

    members: tuple[KnownNode, ...]

    @property
    def one(self) -> KnownNode:
        return self.members[0]


def judged_by_members(
    claimed: ClaimedArtifacts,
    order: Work,
    member: KnownNode,
    others: Sequence[NodeSource],
    options: JudgingOptions,
    seed: str,
) -> VerdictReport:
    """The verdict about the nonces of ``claimed``, which ``others`` compute now, each once.

    ``member`` has what is claimed, and what the member says of itself. It is cleared by the bits
    that more than half of all have, or by distances; convicted by distances from three others
    that differ. If most have bits that it has not, though it says that it is as they are, it has
    not proved. Raises UnprovedError for that, ReportedError if too few others answer.
    """
    found, silent = _answers(order, others, claimed)
    if len(found) < 2:
        text = f"{len(found)} of {len(others)} other members answered, and two are needed"
        raise ReportedError(f"{text}: {'; '.join(silent)}" if silent else text)
    nonces = claimed.nonces
    alike = _by_bits(found, nonces)
    same = [each for each in found if equal_bits(each, member, nonces) == len(nonces)]
    everyone, agreeing = len(found) + 1, len(same) + 1
    enough = len(nonces) >= nonces_needed(options.chances())
    if same and 2 * agreeing > everyone and enough and not claimed.faults:
        text = f"its bits are those of {agreeing - 1} of {everyone - 1} other members"
        return _report(claimed, found[0], options, seed, SequentialResult.HONEST, text)
    largest = max(alike, key=lambda each: len(each.members))
    is_other = not any(are_alike(each, member, nonces) for each in largest.members)
    if is_other and 2 * len(largest.members) > everyone and _says_the_same(member, largest):
        text = (
            f"it says that it is as {len(largest.members)} other members, which have equal bits,"
            " and has other bits"
        )
        raise UnprovedError(Unproved.OTHER_BITS, text)
    different = [each.one for each in alike]
    if len(different) < ENOUGH:
        text = (
            f"its bits are those of {agreeing - 1} of {everyone - 1} other members, and"
            f" {len(different)} of these differ: distances need {ENOUGH} that do"
        )
        return _report(claimed, found[0], options, seed, SequentialResult.UNDECIDED, text)
    known = Witnesses(different, (), nonces)
    return judged_by_distance(claimed, known, options, seed)


def _answers(
    order: Work, others: Sequence[NodeSource], claimed: ClaimedArtifacts
) -> tuple[list[KnownNode], list[str]]:
    """Those that answered, and why others did not: one that is down delays no verdict."""

    def answer(source: NodeSource) -> KnownNode | str:
        try:
            made = asked(source, order, claimed.nonces)
            claimed.require_digest(made.weights_digest)
        except (WitnessError, UnprovedError) as error:
            # Another digest is no fault of the member that is judged.
            return str(error)
        return made

    with ThreadPoolExecutor(max(1, len(others))) as threads:
        made = list(threads.map(answer, others))
    found = [each for each in made if isinstance(each, KnownNode)]
    return found, [each for each in made if isinstance(each, str)]


def _by_bits(found: Sequence[KnownNode], nonces: Sequence[int]) -> list[_Alike]:
    alike: list[_Alike] = []
    for node in found:
        place = next((i for i, each in enumerate(alike) if are_alike(each.one, node, nonces)), None)
        if place is None:
            alike.append(_Alike((node,)))
        else:
            alike[place] = _Alike((*alike[place].members, node))
    return alike


def _says_the_same(member: KnownNode, alike: _Alike) -> bool:
    """Whether it has the same card and engine by its own words, as all of them."""
    return member.kind is not None and all(each.facts == member.facts for each in alike.members)


def _report(
    claimed: ClaimedArtifacts,
    beside: KnownNode,
    options: JudgingOptions,
    seed: str,
    verdict: SequentialResult,
    text: str,
) -> VerdictReport:
    """A verdict by bits, with the distances from one of the others."""
    width = len(beside.vectors[claimed.nonces[0]])
    ours = truth_of(beside, width, len(claimed.nonces))
    errors = claim_errors(claimed.nonces, beside.vectors, claimed.claims, width)
    opinion = Opinion("members", verdict, len(claimed.nonces), text, {})
    found = settled(Verification(verdict, (opinion,), errors), claimed, ours)
    return VerdictReport(found, claimed, seed, options, "most members", how="compared")
