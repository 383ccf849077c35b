"""Which client got which answer: bounded in number and time, and no client takes another's."""

from gateway.kit import Clock
from proofserve.gateway.gateway import ROUTES, AnsweredRequests

CHAT = ROUTES[b"/v1/chat/completions"]


def test_an_answer_is_found_by_its_client_alone() -> None:
    answered = AnsweredRequests(10, Clock())
    answered.add(CHAT, b"r1", "web", "http://a")
    answered.add(ROUTES[b"/v1/completions"], b"r1", "app", "http://b")
    assert answered.backend_of("chatcmpl-r1", "web") == "http://a"
    assert answered.backend_of("cmpl-r1", "app") == "http://b"
    assert answered.backend_of("chatcmpl-r1", "app") is None
    assert answered.backend_of("cmpl-r1", "web") is None
    assert answered.backend_of("r1", "web") is None
    assert answered.backend_of("\ud800", "web") is None


def test_what_has_no_receipts_is_not_remembered() -> None:
    answered = AnsweredRequests(10, Clock())
    answered.add(ROUTES[b"/v1/embeddings"], b"r1", "web", "http://a")
    assert len(answered) == 0
    off = AnsweredRequests(0, Clock())
    off.add(CHAT, b"r1", "web", "http://a")
    assert len(off) == 0


def test_an_id_that_another_client_uses_again_stays_with_the_first() -> None:
    answered = AnsweredRequests(10, Clock())
    answered.add(CHAT, b"r1", "web", "http://a")
    answered.add(CHAT, b"r1", "thief", "http://a")
    assert answered.backend_of("chatcmpl-r1", "web") == "http://a"
    assert answered.backend_of("chatcmpl-r1", "thief") is None
    # The same client that tries again gets its newest answer.
    answered.add(CHAT, b"r1", "web", "http://b")
    assert answered.backend_of("chatcmpl-r1", "web") == "http://b"


def test_the_newest_are_always_known_and_never_more() -> None:
    answered = AnsweredRequests(10, Clock())
    for n in range(1000):
        answered.add(CHAT, b"%d" % n, "web", "http://a")
        assert len(answered) <= 10
        newest = range(max(0, n - 9), n + 1)
        assert all(answered.backend_of(f"chatcmpl-{m}", "web") for m in newest)
    assert answered.backend_of("chatcmpl-900", "web") is None


def test_answers_are_forgotten_after_their_time() -> None:
    clock = Clock()
    answered = AnsweredRequests(10, clock, keep_s=100.0)
    answered.add(CHAT, b"r1", "web", "http://a")
    clock.now += 49.0
    answered.add(CHAT, b"r2", "web", "http://a")
    clock.now += 50.0
    assert answered.backend_of("chatcmpl-r1", "web") == "http://a"
    clock.now += 50.0
    assert answered.backend_of("chatcmpl-r1", "web") is None
    answered.add(CHAT, b"r3", "web", "http://a")
    clock.now += 1000.0
    assert answered.backend_of("chatcmpl-r3", "web") is None
    assert len(answered) == 0
