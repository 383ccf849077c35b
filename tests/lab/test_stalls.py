import itertools

import pytest

from proofserve.rounds.status import EngineGauges
from proofserve_lab.bench.chat import Saturation, Window, longest_silence, read_windows, stall_s
from proofserve_lab.chats import Reply

FORWARD_S = 0.14


def replies(*ended: float) -> list[Reply]:
    return [Reply(("x",), 90, 10, at - 1.0, at) for at in ended]


def test_a_silence_counts_to_the_end_and_from_the_reply_before_the_beginning() -> None:
    assert longest_silence(replies(1.0, 2.0, 2.5), 0.5, 4.0) == pytest.approx(1.5)
    assert longest_silence(replies(1.0, 9.0), 2.0, 5.0) == 4.0
    assert longest_silence([], 0.0, 3.0) == 3.0


def test_one_proof_between_two_steps_is_no_stall() -> None:
    usual = [0.1, 0.12, 0.15, 0.11]
    assert 0.12 + FORWARD_S < stall_s(usual) < 0.5


def window(beside_round: bool, began: float, proofs: int = 0) -> Window:
    gauges = EngineGauges(0, 0.0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0)
    return Window(beside_round, began, began + 3.0, gauges, gauges, proofs)


def read(pauses_plain: list[float], pauses_round: list[float], proofs: int) -> Saturation:
    """Windows of three seconds in turns, each with one pause at its beginning.

    Otherwise an answer comes every 0.1 s.
    """
    windows, times = [], [-0.1]
    turns = itertools.chain.from_iterable(zip(pauses_plain, pauses_round, strict=True))
    for number, pause in enumerate(turns):
        began = 3.0 * number
        steps = [0.1] * int((3.0 - pause) / 0.1)
        times += [began + at for at in itertools.accumulate([pause, *steps[:-1]])]
        beside_round = bool(number % 2)
        windows.append(window(beside_round, began, proofs if beside_round else 0))
    return read_windows(windows, replies(*sorted(times), times[-1] + 0.1), 1)


def test_windows_in_which_the_machine_stood_still_are_left_out() -> None:
    found = read([0.1, 0.1, 1.2, 0.1], [0.1, 0.9, 0.1, 0.1], proofs=0)
    assert (found.stalled_plain, found.stalled_beside_round) == (1, 1)
    assert len(found.plain) == len(found.beside_round) == 3
    assert found.throughput_ratio == pytest.approx(1.0, abs=0.03)


def test_a_proof_of_a_stall_just_before_its_window_is_left_out_with_the_window() -> None:
    # Recorded: chat alone had silences of 0.11 to 0.14 s. While a round was being started the
    # machine stood still for 0.6 s, one forward used that, and its 32 nonces were stored when the
    # window had begun.
    windows = [window(False, 0.0), window(True, 3.55, 32), window(True, 6.6), window(False, 9.65)]
    before, after = [0.12 * n - 0.12 for n in range(26)], [3.62 + 0.12 * n for n in range(80)]
    found = read_windows(windows, replies(*before, *after), 1)
    assert (found.stalled_plain, found.stalled_beside_round) == (0, 1)
    assert (found.proofs_while_saturated, found.proofs_in_stalls) == (0, 32)
    assert len(found.beside_round) == 1


def test_proofs_that_do_not_give_way_are_not_excused() -> None:
    slips = read([0.1] * 4, [0.1 + FORWARD_S] * 4, proofs=8)
    assert slips.stalled_beside_round == 0
    assert slips.proofs_while_saturated == 32
    # Several in a row look like a stall, and then in every window: the report fails on that.
    takes_over = read([0.1] * 4, [1.5] * 4, proofs=80)
    assert takes_over.stalled_beside_round == 4
    assert takes_over.throughput_ratio is None
