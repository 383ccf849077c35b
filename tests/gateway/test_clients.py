"""Keys, and what each may use."""

import asyncio
import random

import pytest

from gateway.kit import Clock
from proofserve.gateway.failures import Failure
from proofserve.gateway.limits import NOTHING, USUAL_ANSWER, Charge, Client, Clients, RequestFields
from proofserve.gateway.records import ClientSpec
from proofserve.web import key_of

SHORT = RequestFields(max_tokens=10)


def client(
    concurrency: int | None = None,
    requests: int | None = None,
    tokens: int | None = None,
    clock: Clock | None = None,
) -> Client:
    spec = ClientSpec(
        name="web",
        key="key",
        concurrency=concurrency,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
    )
    found = Clients([spec], clock or Clock()).find(b"key")
    assert found is not None
    return found


def let_in(who: Client, order: RequestFields = SHORT, size: int = 90) -> Charge:
    charge = who.admit(order, size)
    assert not isinstance(charge, Failure)
    return charge


def refused(who: Client, order: RequestFields = SHORT, size: int = 90) -> Failure:
    failure = who.admit(order, size)
    assert isinstance(failure, Failure)
    assert failure.status == 429
    assert failure.retry_after is not None
    return failure


def test_without_keys_every_request_is_one_clients_without_limits() -> None:
    clients = Clients([])
    anonymous = clients.find(b"")
    assert anonymous is clients.find(key_of(b"Bearer whatever"))
    assert anonymous is not None
    assert clients.open
    assert [let_in(anonymous) for _ in range(1000)] == [NOTHING] * 1000
    assert anonymous.in_flight == 1000
    assert clients.all() == [anonymous]


def test_each_key_finds_its_holder_and_no_other_key_does() -> None:
    clients = Clients([ClientSpec(name="a", key="one"), ClientSpec(name="b", key="schlüssel")])
    found = [clients.find(key_of(key.encode())) for key in ("Bearer one", "Bearer schlüssel")]
    assert [each.name for each in found if each] == ["a", "b"]
    assert clients.all() == found
    for wrong in (b"", b"one", b"Bearer", b"Bearer two", b"Basic one", b"Bearer onetwo"):
        assert clients.find(key_of(wrong)) is None
    assert not clients.open


def test_no_key_lies_in_memory() -> None:
    clients = Clients([ClientSpec(name="a", key="very-secret")])
    seen = [vars(clients), *(vars(each) for each in clients.all())]
    assert "very-secret" not in repr(seen)


def test_concurrency_is_what_is_in_flight_now() -> None:
    some = client(concurrency=2)
    first, _ = let_in(some), let_in(some)
    assert refused(some).code == "concurrency_limit"
    assert some.in_flight == 2
    some.settle(first, 0)
    let_in(some)


def test_the_rate_of_requests_says_when_to_come_back() -> None:
    some = client(requests=3)
    for _ in range(3):
        some.settle(let_in(some), 0)
    failure = refused(some)
    assert failure.code == "request_rate_limit"
    assert 55 <= (failure.retry_after or 0) <= 61
    assert some.in_flight == 0


def test_tokens_are_set_aside_before_and_settled_after() -> None:
    some = client(tokens=200)
    charge = let_in(some)
    assert charge[0] == 100
    failure = refused(some, size=91)
    assert failure.code == "token_rate_limit"
    assert 55 <= (failure.retry_after or 0) <= 61
    some.settle(charge, 30)
    let_in(some, size=160)
    refused(some, RequestFields(max_tokens=0), size=1)


def test_an_answer_of_unknown_length_sets_the_usual_one_aside() -> None:
    some = client(tokens=10_000)
    assert let_in(some, RequestFields(), 50)[0] == 50 + USUAL_ANSWER
    assert let_in(some, RequestFields(max_tokens=0), 50)[0] == 50


def test_a_request_beyond_the_whole_budget_is_told_not_to_come_back() -> None:
    some = client(tokens=100)
    failure = some.admit(RequestFields(max_tokens=50), 51)
    assert isinstance(failure, Failure)
    assert (failure.status, failure.code, failure.retry_after) == (400, "beyond_token_budget", None)
    assert "101 tokens" in failure.message
    assert "100 per minute" in failure.message
    let_in(some, RequestFields(max_tokens=50), 50)
    assert some.in_flight == 1


def test_an_unknown_usage_keeps_the_reservation() -> None:
    some = client(tokens=100)
    some.settle(let_in(some), None)
    refused(some, size=1)
    assert some.in_flight == 0


def test_usage_beyond_the_reservation_counts_too() -> None:
    some = client(tokens=1000)
    some.settle(let_in(some), 950)
    refused(some, size=41)
    let_in(some, size=40)


def test_a_request_beyond_its_rate_gets_its_tokens_back() -> None:
    some = client(requests=1, tokens=1000)
    some.settle(let_in(some), 0)
    for _ in range(50):
        assert refused(some, size=990).code == "request_rate_limit"
    assert some._tokens is not None
    assert some._tokens.take(1000)


def test_a_negative_length_earns_nothing() -> None:
    some = client(tokens=1000)
    for order in (RequestFields(max_tokens=-100_000), RequestFields(max_tokens=1_000, n=-100)):
        some.settle(let_in(some, order, size=0), None)
    # The second has asked for a thousand, and not for minus a hundred times as many.
    refused(some, RequestFields(max_tokens=0), 1)


def test_the_next_minute_is_a_new_one() -> None:
    clock = Clock()
    some = client(tokens=100, clock=clock)
    late = let_in(some)
    clock.now += 30
    assert refused(some).retry_after == 30
    clock.now += 30
    let_in(some)
    # What the last minute left over is not this one's.
    some.settle(late, 0)
    refused(some, size=1)


def test_names_of_two_clients_never_share_a_budget() -> None:
    clients = Clients(
        [
            ClientSpec(name="a", key="one", requests_per_minute=1, tokens_per_minute=50),
            ClientSpec(name="b", key="two", requests_per_minute=1, tokens_per_minute=50),
        ]
    )
    for each in clients.all():
        let_in(each, size=40)


@pytest.mark.anyio
async def test_200_racing_requests_never_exceed_their_key() -> None:
    some = client(concurrency=20, tokens=5_000)
    rng = random.Random(1)
    most = used = set_aside = refusals = 0

    async def request() -> None:
        nonlocal most, used, set_aside, refusals
        await asyncio.sleep(0)
        size, answer = rng.randint(1, 60), rng.randint(0, 60)
        charge = some.admit(RequestFields(max_tokens=answer), size)
        if isinstance(charge, Failure):
            refusals += 1
            return
        set_aside += charge[0]
        most = max(most, some.in_flight)
        assert used + set_aside <= 5_000
        for _ in range(rng.randint(1, 5)):
            await asyncio.sleep(0)
        spent = rng.choice([None, rng.randint(0, charge[0])])
        some.settle(charge, spent)
        set_aside -= charge[0]
        used += charge[0] if spent is None else spent

    for _ in range(5):
        await asyncio.gather(*(request() for _ in range(200)))
    assert most == 20
    assert refusals > 0
    assert some.in_flight == set_aside == 0
    # Nothing that was given back is lost either: the key can use up the rest.
    let_in(some, RequestFields(max_tokens=0), 5_000 - used)
    refused(some, RequestFields(max_tokens=0), 1)
