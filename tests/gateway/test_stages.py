"""Random walks: an exchange makes only legal moves, and frees each thing that it holds once."""

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.kit import Clock
from proofserve.gateway.exchange import (
    CONNECTING,
    ENDED,
    PIPELINED,
    QUEUED,
    RECEIVING,
    RELAYING,
    TABLE,
    WAITING,
    Exchange,
    IllegalMove,
    Stage,
    StageMove,
    step,
)
from proofserve.gateway.failures import BACKEND_BROKE, BODY_TOO_LARGE, UNREACHABLE
from proofserve.gateway.gateway import ROUTES, Gateway, RelayTarget
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan, Timeouts

CHAT = b"/v1/chat/completions"
TARGET = RelayTarget(CHAT, ROUTES[CHAT])
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked"
EVENT = b"6\r\ndata\n\n\r\n"
TIMEOUTS = Timeouts(queue=20, connect=5, first_byte=15, stall=10, total=40)
PLAN = GatewayPlan(
    backends=tuple(BackendSpec(f"http://{name}") for name in "abcd"),
    clients=(ClientSpec(name="web", key="k", concurrency=6, tokens_per_minute=5000),),
    max_concurrent=1,
    queue_limit=2,
    timeouts=TIMEOUTS,
)

KEYS = st.sampled_from([b"k"] * 7 + [b"wrong"])
HELD = st.sampled_from([False, False, False, True])
BODIES = st.sampled_from([b"{}"] * 5 + [b"[", b'{"max_tokens": 9999}'])


def test_the_table_has_every_move_and_a_way_out_of_every_stage_but_the_last() -> None:
    assert set(TABLE) == set(StageMove)
    left = {stage for line in TABLE.values() for stage in line}
    reached = {stage for line in TABLE.values() for stage in line.values()}
    assert left == set(Stage) - {ENDED}
    assert reached == set(Stage)


@pytest.mark.parametrize("move", StageMove, ids=lambda move: move.name)
def test_a_move_that_the_table_does_not_have_is_refused(move: StageMove) -> None:
    for stage in Stage:
        if stage in TABLE[move]:
            assert step(stage, move) is TABLE[move][stage]
        else:
            with pytest.raises(IllegalMove, match=f"{move.name} in stage {stage.name}"):
                step(stage, move)


class Upstream:
    """A connection to a backend that records which exchange holds it."""

    def __init__(self, pool: "Pool", used: bool) -> None:
        self.pool = pool
        self.used = used
        self.silent = True
        self.until_close = False
        self.reader: Exchange | None = None
        # Whether an exchange holds it.
        self.taken = True

    def send(self, reader: Exchange, _head: bytes, _body: bytes) -> None:
        self.reader, self.silent = reader, True

    def pause(self) -> None:
        assert self.taken

    def resume(self) -> None:
        assert self.taken

    def release(self) -> None:
        assert self.taken, "released twice"
        self.taken, self.reader = False, None

    def return_unused(self) -> None:
        self.release()
        self.pool.idle.append(self)


class Pool:
    """A pool that connects when a rule of the walk tells it to."""

    host = b"backend"
    opened = 0

    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.idle: list[Upstream] = []
        self.made: list[Upstream] = []

    def acquire(self, waiting: Any, fresh: bool = False) -> None:
        if self.idle and not fresh:
            upstream = self.idle.pop()
            upstream.taken = True
            waiting.connected(upstream)
        else:
            self.waiting.append(waiting)


class Client:
    """A client's connection with one request, which gets at most one answer."""

    write_paused = False

    def __init__(self) -> None:
        self.endings = 0

    def write(self, _data: bytes) -> None:
        assert not self.endings, "written to after the end"

    def answered(self, _exchange: object) -> None:
        self.endings += 1

    def abort(self) -> None:
        assert not self.endings


async def gateway_of(plan: GatewayPlan) -> Gateway:
    return Gateway(plan)


class Walk(RuleBasedStateMachine):
    """Any event may happen at any time in any of several exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        gateway: Any = asyncio.run(gateway_of(PLAN))
        gateway.loop = self
        (client,) = gateway.clients.all()
        client._tokens._clock = self.clock
        for backend in gateway.pool.backends:
            backend.pool, backend._clock = Pool(), self.clock
        self.gateway: Gateway = gateway
        self.exchanges: list[tuple[Exchange, Client]] = []

    def time(self) -> float:
        """The loop's time, as the gateway reads it."""
        return self.clock.now

    @property
    def pools(self) -> list[Pool]:
        return [cast("Any", backend.pool) for backend in self.gateway.pool.backends]

    def some(self, number: int, *stages: Stage) -> Exchange | None:
        """One of the exchanges in these stages."""
        found = [each for each, _ in self.exchanges if each._stage in stages]
        return found[number % len(found)] if found else None

    def answering(self, number: int) -> Upstream | None:
        """One of the connections on which an answer is due."""
        found = [each for pool in self.pools for each in pool.made if each.reader is not None]
        return found[number % len(found)] if found else None

    def stages(self, *stages: Stage) -> int:
        return sum(each._stage in stages for each, _ in self.exchanges)

    # -- what a client does ------------------------------------------------------------------

    @rule(number=st.integers(1, 4))
    def ask(self, number: int) -> None:
        """Several whole requests: more than there are permits."""
        for _ in range(number):
            self.arrive(b"k", held=False)
            self.send_body(-1, b"{}")

    @precondition(lambda self: len(self.exchanges) < 12)
    @rule(
        key=st.sampled_from([b"k"] * 7 + [b"wrong"]),
        held=st.sampled_from([False, False, False, True]),
    )
    def arrive(self, key: bytes, held: bool) -> None:
        client = Client()
        headers = [(b"authorization", b"Bearer " + key)]
        exchange = Exchange(
            self.gateway, cast("Any", client), TARGET, headers, dict(headers), keep_alive=True
        )
        if held:
            exchange.hold()
        self.exchanges.append((exchange, client))

    @rule(
        number=st.integers(0), body=st.sampled_from([b"{}"] * 5 + [b"[", b'{"max_tokens": 9999}'])
    )
    def send_body(self, number: int, body: bytes) -> None:
        if exchange := self.some(number, RECEIVING):
            exchange.body_received(body)
            exchange.start()

    @rule(number=st.integers(0))
    def send_too_much(self, number: int) -> None:
        if exchange := self.some(number, RECEIVING):
            exchange.refuse(BODY_TOO_LARGE)
            exchange.start()

    @rule(number=st.integers(0))
    def answer_the_earlier_request(self, number: int) -> None:
        if exchange := self.some(number, PIPELINED):
            exchange.resume_receiving()

    @rule(number=st.integers(0))
    def leave(self, number: int) -> None:
        if exchange := self.some(number, *Stage):
            exchange.client_gone()

    @rule(number=st.integers(0), pause=st.booleans())
    def read_slowly(self, number: int, pause: bool) -> None:
        if exchange := self.some(number, CONNECTING, WAITING, RELAYING):
            (exchange.pause if pause else exchange.resume)()

    # -- what a backend does -----------------------------------------------------------------

    @rule(number=st.integers(0), works=st.sampled_from([True, True, False]), used=st.booleans())
    def connect(self, number: int, works: bool, used: bool) -> None:
        pools = [pool for pool in self.pools if pool.waiting]
        if not pools:
            return
        pool = pools[number % len(pools)]
        waiting = pool.waiting.pop(0)
        if not works:
            waiting.connect_failed(UNREACHABLE)
            return
        upstream = Upstream(pool, used)
        pool.made.append(upstream)
        waiting.connected(upstream)

    @rule(
        number=st.integers(0), status=st.sampled_from([200, 200, 404, 503]), complete=st.booleans()
    )
    def answer(self, number: int, status: int, complete: bool) -> None:
        upstream = self.answering(number)
        if upstream is None or upstream.reader is None:
            return
        upstream.silent = False
        if upstream.reader._stage is WAITING:
            upstream.reader.answer_begins(status, STREAM, EVENT, complete)
        else:
            upstream.reader.answer_goes_on(EVENT, complete)

    @rule(number=st.integers(0))
    def break_off(self, number: int) -> None:
        upstream = self.answering(number)
        if upstream is not None and upstream.reader is not None:
            reader, upstream.reader = upstream.reader, None
            # A broken connection is not released, because it no longer exists.
            upstream.taken = False
            reader.answer_broken(BACKEND_BROKE)

    # -- time, and the end -------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 5.0, 11.0, 16.0, 41.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        for watched in list(self.gateway.deadlines.watched):
            watched.check(self.clock.now)

    @rule(number=st.integers(0))
    def shut_down(self, number: int) -> None:
        unfinished = list(self.gateway.deadlines.watched)
        if unfinished:
            unfinished[number % len(unfinished)].shut_down()

    @invariant()
    def permits_and_places_belong_to_exchanges_that_have_not_ended(self) -> None:
        gateway = self.gateway
        at_backends = self.stages(CONNECTING, WAITING, RELAYING)
        (client,) = gateway.clients.all()
        assert gateway.admission.in_use == at_backends
        assert gateway.admission.queued == self.stages(QUEUED)
        assert client.in_flight == at_backends + self.stages(QUEUED)
        assert sum(backend.outstanding for backend in gateway.pool.backends) == at_backends
        taken = sum(upstream.taken for pool in self.pools for upstream in pool.made)
        assert taken == self.stages(WAITING, RELAYING)

    @invariant()
    def every_request_has_one_end(self) -> None:
        for exchange, client in self.exchanges:
            assert client.endings == (exchange._stage is ENDED) == exchange.response_complete
        assert sum(self.gateway.totals.outcomes.values()) == self.stages(ENDED)
        assert len(self.gateway.deadlines.watched) == len(self.exchanges) - self.stages(ENDED)

    @invariant()
    def no_deadline_is_far_away(self) -> None:
        for exchange, _ in self.exchanges:
            if exchange._stage not in {PIPELINED, ENDED}:
                assert exchange.deadline(self.clock.now) <= self.clock.now + TIMEOUTS.total

    def teardown(self) -> None:
        """Let every deadline pass, and assert that nothing is held."""
        for _ in range(2 * len(self.exchanges)):
            for number in itertools.count():
                if self.stages(PIPELINED) == 0:
                    break
                self.answer_the_earlier_request(number)
            self.wait(41.0)
        assert self.stages(ENDED) == len(self.exchanges)
        self.permits_and_places_belong_to_exchanges_that_have_not_ended()
        self.every_request_has_one_end()


Walk.TestCase.settings = settings(max_examples=80, stateful_step_count=80, deadline=None)
TestWalk = Walk.TestCase
