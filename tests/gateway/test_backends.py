"""The choice of a backend for a request."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.kit import Clock, backend
from proofserve.gateway.backends import FAULTS, LONGEST_REST_S, REST_S, Backend, BackendPool

MODEL = {"id": "tiny"}


def pool(*backends: Backend, affinity: bool = False) -> BackendPool:
    return BackendPool(backends, affinity)


def named(names: str, clock: Clock | None = None) -> list[Backend]:
    return [backend(name, clock=clock) for name in names]


def chosen(some: BackendPool, times: int, prefix: bytes = b"") -> Counter[str]:
    """How often each backend is chosen when no request ends."""
    found: Counter[str] = Counter()
    for _ in range(times):
        best = some.choose(None, prefix, ())
        assert best is not None
        best.chosen()
        found[best.name] += 1
    return found


def serve_one(each: Backend) -> None:
    each.chosen()
    each.worked()
    each.released()


def fail_one(each: Backend) -> None:
    each.chosen()
    each.failed()
    each.released()


def eject(each: Backend) -> None:
    for _ in range(FAULTS):
        fail_one(each)


def test_the_fleet_chooses_the_least_busy_backend() -> None:
    a, b, c = named("abc")
    for busy in (a, a, b, c, c):
        busy.chosen()
    assert pool(a, b, c).choose(None, b"", ()) is b


def test_equally_busy_backends_take_turns() -> None:
    some = pool(*named("abc"))
    idle = [some.choose(None, b"", ()) for _ in range(9)]
    assert Counter(each.name for each in idle if each) == {f"http://{n}": 3 for n in "abc"}


def test_the_fleet_keeps_the_weights_over_many_requests() -> None:
    some = pool(backend("a", 1), backend("b", 2), backend("c", 0.5))
    assert chosen(some, 700) == {"http://a": 200, "http://b": 400, "http://c": 100}


def test_the_fleet_skips_tried_and_draining_backends() -> None:
    a, b, c = named("abc")
    some = pool(a, b, c)
    b.draining = True
    assert {some.choose(None, b"", {a}) for _ in range(5)} == {c}
    assert some.choose(None, b"", {a, c}) is None


def test_a_single_backend_is_used_until_it_was_tried_or_drains() -> None:
    (only,) = named("a")
    some = pool(only)
    only.healthy = False
    eject(only)
    assert some.choose("any", b"", ()) is only
    assert some.choose("any", b"", {only}) is None
    only.models = {}
    assert some.choose("any", b"", ()) is None
    only.models, only.draining = None, True
    assert some.choose("any", b"", ()) is None


def test_a_request_goes_to_a_backend_that_serves_its_model() -> None:
    a, b = named("ab")
    some = pool(a, b)
    a.models, b.models = {"tiny": MODEL}, {"large": MODEL}
    assert {some.choose("large", b"", ()) for _ in range(4)} == {b}
    assert {some.choose(None, b"", ()) for _ in range(4)} == {a, b}
    assert some.knows("tiny")
    assert some.knows(None)
    assert not some.knows("huge")
    assert some.choose("huge", b"", ()) is None


def test_a_backend_that_was_not_probed_yet_may_serve_any_model() -> None:
    a, b = named("ab")
    a.models = {"tiny": MODEL}
    assert pool(a, b).choose("huge", b"", ()) is b
    assert pool(a, b).knows("huge")


def test_only_a_known_model_becomes_a_label() -> None:
    (a,) = named("a")
    assert a.label("tiny") == "unknown"
    a.models = {"tiny": MODEL}
    assert [a.label(name) for name in ("tiny", "made up", None)] == ["tiny", "unknown", "unknown"]


def test_a_backend_is_found_by_its_url() -> None:
    a, b = named("ab")
    assert pool(a, b).named("http://b") is b
    assert pool(a, b).named("http://c") is None


def test_a_backend_rests_after_several_faults_in_a_row() -> None:
    clock = Clock()
    a, b = named("ab", clock)
    for _ in range(FAULTS - 1):
        fail_one(a)
    assert not a.resting
    fail_one(a)
    assert a.resting
    assert a.ejections == 1
    assert {pool(a, b).choose(None, b"", ()) for _ in range(4)} == {b}
    clock.now += REST_S
    assert not a.resting


def test_an_answer_resets_the_count_of_faults() -> None:
    (a,) = named("a")
    for _ in range(10):
        fail_one(a)
        fail_one(a)
        serve_one(a)  # a 4xx is an answer too
    assert a.ejections == 0


def test_a_crash_under_load_ejects_a_backend_once() -> None:
    clock = Clock()
    (a,) = named("a", clock)
    for _ in range(100):
        a.chosen()
    for _ in range(100):
        a.failed()
        a.released()
    assert a.ejections == 1
    clock.now += REST_S
    assert not a.resting


def test_after_a_rest_one_request_tries_the_backend() -> None:
    clock = Clock()
    a, b = named("ab", clock)
    some = pool(a, b)
    eject(a)
    clock.now += REST_S
    b.chosen()
    assert some.choose(None, b"", ()) is a
    a.chosen()
    for _ in range(5):
        b.chosen()
        assert some.choose(None, b"", ()) is b
    a.worked()
    assert some.choose(None, b"", ()) is a


def test_a_trial_whose_client_left_changes_nothing() -> None:
    clock = Clock()
    (a,) = named("a", clock)
    eject(a)
    clock.now += REST_S
    a.chosen()
    assert a.resting
    a.released()
    assert not a.resting
    a.chosen()
    assert a.resting


def test_rests_double_up_to_a_bound_until_an_answer() -> None:
    clock = Clock()
    (a,) = named("a", clock)
    eject(a)
    rests = []
    for _ in range(8):
        began = clock.now
        while a.resting:
            clock.now += 1
        rests.append(clock.now - began)
        fail_one(a)
    assert rests == [2, 4, 8, 16, 32, LONGEST_REST_S, LONGEST_REST_S, LONGEST_REST_S]
    clock.now += LONGEST_REST_S
    serve_one(a)
    eject(a)
    clock.now += REST_S
    assert not a.resting


def test_if_all_backends_are_unhealthy_the_fleet_still_chooses_one() -> None:
    a, b = named("ab")
    some = pool(a, b)
    a.healthy = False
    eject(b)
    assert {some.choose(None, b"", ()) for _ in range(4)} == {a, b}
    assert some.choose(None, b"", {a}) is b


def test_a_last_resort_that_fails_does_not_lengthen_its_rest() -> None:
    clock = Clock()
    (a,) = named("a", clock)
    eject(a)
    for _ in range(20):
        fail_one(a)
    clock.now += REST_S
    assert not a.resting


def test_a_last_resort_that_works_ends_its_rest() -> None:
    (a,) = named("a")
    eject(a)
    serve_one(a)
    assert not a.resting


PREFIXES = [b"conversation %d" % n for n in range(400)]


def homes(some: BackendPool) -> list[str]:
    """The backend of each prefix while all backends are idle."""
    found = [some.choose(None, prefix, ()) for prefix in PREFIXES]
    return [each.name for each in found if each]


def test_prompts_with_the_same_beginning_go_to_the_same_backend() -> None:
    some = pool(*named("abcd"), affinity=True)
    assert homes(some) == homes(some)
    shares = Counter(homes(some))
    assert min(shares.values()) > 60
    assert len(shares) == 4


def test_the_order_of_backends_does_not_change_the_choice() -> None:
    backends = named("abcd")
    assert homes(pool(*backends, affinity=True)) == homes(pool(*backends[::-1], affinity=True))


def test_if_a_backend_leaves_only_its_prefixes_move() -> None:
    backends = named("abcd")
    some = pool(*backends, affinity=True)
    before = homes(some)
    backends[2].draining = True
    after = homes(some)
    assert [new for old, new in zip(before, after, strict=True) if old != "http://c"] == [
        old for old in before if old != "http://c"
    ]
    moved = Counter(new for old, new in zip(before, after, strict=True) if old == "http://c")
    assert set(moved) == {"http://a", "http://b", "http://d"}


@pytest.mark.parametrize("affinity", [False, True])
def test_a_request_without_a_prefix_goes_to_the_least_busy_backend(affinity: bool) -> None:
    a, b = named("ab")
    a.chosen()
    assert pool(a, b, affinity=affinity).choose(None, b"", ()) is b


def test_without_the_option_the_fleet_ignores_prefixes() -> None:
    assert chosen(pool(*named("ab")), 10, b"the same") == {"http://a": 5, "http://b": 5}


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=12),
    requests=st.integers(1, 120),
)
def test_a_popular_prefix_does_not_overload_its_backend(
    weights: Sequence[float], requests: int
) -> None:
    backends = [backend(f"b{n}", weight) for n, weight in enumerate(weights)]
    chosen(pool(*backends, affinity=True), requests, b"the same")
    for each in backends:
        even = requests * each.spec.weight / sum(weights)
        # A quarter above an even share, rounded up to whole requests.
        assert each.outstanding < 1.25 * even + 1 + 1e-6
