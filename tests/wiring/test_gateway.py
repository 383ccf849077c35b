"""The gateway as the settings want it."""

import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from proofserve.gateway.protocol import GatewayProtocol
from proofserve.gateway.records import BackendSpec, ClientSpec, GatewayPlan, Timeouts
from proofserve.settings.gateway import PREFIX, GatewaySettings
from proofserve.wire import RECEIPTS
from proofserve.wiring import gateway
from proofserve.wiring.gateway import application, backends_of, plan_of, run_gateway


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables at first, and none left behind: a gateway writes its settings there."""
    for name in GatewaySettings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_plan_of_defaults_is_the_default_plan() -> None:
    expected = GatewayPlan((BackendSpec("http://127.0.0.1:8001"),), receipts_path=RECEIPTS)
    assert plan_of(GatewaySettings()) == expected


@pytest.mark.parametrize("seconds", [30, 3600])
def test_without_a_stall_timeout_only_the_request_timeout_ends_an_answer(seconds: float) -> None:
    timeouts = plan_of(GatewaySettings(request_timeout_seconds=seconds)).timeouts
    assert timeouts.stall == timeouts.total == seconds
    given = GatewaySettings(request_timeout_seconds=seconds, stall_timeout_seconds=9)
    assert plan_of(given).timeouts.stall == 9


def test_every_setting_reaches_the_plan(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[client]]\nname = "anna"\nkey = "k"\ntokens_per_minute = 9\n')
    chosen = GatewaySettings(
        backend_url="http://a:1*3",
        max_concurrent_requests=5,
        max_queued_requests=6,
        queue_wait_timeout_seconds=1,
        connect_timeout_seconds=2,
        first_byte_timeout_seconds=3,
        stall_timeout_seconds=4,
        request_timeout_seconds=7,
        drain_timeout_seconds=8,
        probe_interval_seconds=9,
        max_body_bytes=10,
        prefix_affinity=True,
        client_keys_file=keys,
        backend_api_key="b",
        gateway_admin_key="c",
        remembered_answers=11,
        cors_origins="https://a, https://b,",
    )
    assert plan_of(chosen) == GatewayPlan(
        backends=(BackendSpec("http://a:1", 3.0),),
        clients=(ClientSpec(name="anna", key="k", tokens_per_minute=9),),
        max_concurrent=5,
        queue_limit=6,
        max_body_bytes=10,
        timeouts=Timeouts(queue=1, connect=2, first_byte=3, stall=4, total=7),
        affinity=True,
        probe_interval=9,
        drain=8,
        backend_key="b",
        admin_key="c",
        cors_origins=("https://a", "https://b"),
        receipts_path=RECEIPTS,
        remembered_answers=11,
    )


@settings(deadline=None)
@given(permits=st.integers(1, 500), queue=st.integers(0, 500), workers=st.integers(1, 16))
def test_all_workers_together_keep_the_limits(permits: int, queue: int, workers: int) -> None:
    plan = plan_of(
        GatewaySettings(
            max_concurrent_requests=permits, max_queued_requests=queue, gateway_workers=workers
        )
    )
    assert plan.max_concurrent >= 1
    assert plan.max_concurrent * workers <= max(permits, workers)
    assert plan.queue_limit * workers <= queue


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("http://a:8001", [("http://a:8001", 1)]),
        ("http://a:8001/", [("http://a:8001", 1)]),
        (" http://a*2 , https://b*0.5 ,", [("http://a", 2), ("https://b", 0.5)]),
        ("unix:/run/vllm.sock", [("unix:/run/vllm.sock", 1)]),
        ("http://[::1]:8001*1e1", [("http://[::1]:8001", 10)]),
    ],
)
def test_backends_and_their_weights(text: str, specs: list[tuple[str, float]]) -> None:
    assert backends_of(text) == (tuple(BackendSpec(*spec) for spec in specs), ())


def test_names_that_dns_knows_stand_beside_plain_urls() -> None:
    text = "dns:http://vllm.models:8001*2,http://a,dns:http://other"
    names = (BackendSpec("http://vllm.models:8001", 2), BackendSpec("http://other"))
    assert backends_of(text) == ((BackendSpec("http://a"),), names)
    plan = plan_of(GatewaySettings(backend_url=text))
    assert (plan.backends, plan.names) == backends_of(text)
    assert plan.lookup_interval == 30


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no backend"),
        (" , ", "no backend"),
        ("http://a,http://a/", "twice.*URL\\*2"),
        ("http://a*1,http://a*2", "twice"),
        ("localhost:8001", "'localhost:8001' is not a URL like"),
        ("a", "'a' is not a URL"),
        ("ftp://a", "'ftp://a' is not a URL"),
        ("http://", "'http://' is not a URL"),
        ("http://:8001", "is not a URL"),
        ("http://a:99999", "is not a URL"),
        ("http://a:b", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://a:8001/v1", "is not a URL"),
        ("unix:", "is not a URL"),
        ("http://a*two", "'two' is not a weight of http://a: give a number above 0"),
        ("http://a*0", "'0' is not a weight"),
        ("http://a*-1", "'-1' is not a weight"),
        ("http://a*nan", "'nan' is not a weight"),
        ("http://a*inf", "'inf' is not a weight"),
        ("dns:vllm:8001", "'vllm:8001' is not a URL like"),
        ("dns:http://a,dns:http://a", "twice"),
        ("dns:https://a", "'dns:https://a': backends that DNS finds need http://"),
        ("dns:unix:/run/vllm.sock", "backends that DNS finds need http://"),
    ],
)
def test_backends_that_cannot_be_meant(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^VLLM_BACKEND_URL.*{words}"):
        backends_of(text)


def test_an_embedded_engine_is_the_only_backend() -> None:
    assert plan_of(GatewaySettings(use_embedded_engine=True, backend_url="nonsense")).backends == ()


class Served:
    """Stands in for the server: keeps what it was told, and ends at once."""

    configs: list[uvicorn.Config] = []  # noqa: RUF012
    starts = has_backend = True

    def __init__(self, config: uvicorn.Config) -> None:
        self.configs.append(config)
        self.started = self.starts

    def run(self, sockets: list[socket.socket]) -> None:
        """As if a signal had come."""
        for each in sockets:
            each.close()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> type[Served]:
    class Fresh(Served):
        configs: list[uvicorn.Config] = []  # noqa: RUF012

    monkeypatch.setattr(gateway, "_Server", Fresh)
    monkeypatch.setattr(gateway, "_allow_open_files", lambda: None)
    # Whether a port of this machine is free is no question of these tests.
    monkeypatch.setattr(gateway, "bound_sockets", lambda _host, _port: [])
    return Fresh


def test_the_server_has_our_protocol_and_leaves_signals_and_logs_alone(
    served: type[Served],
) -> None:
    run_gateway(GatewaySettings(host="127.0.0.1", port=7001))
    (config,) = served.configs
    assert (config.host, config.port, config.workers) == ("127.0.0.1", 7001, 1)
    assert config.http is GatewayProtocol
    assert not config.access_log
    # Without a lifespan there would be no gateway, and no error message.
    assert config.lifespan == "on"
    assert config.timeout_keep_alive == 75


def test_the_application_reads_what_was_chosen(served: type[Served]) -> None:
    run_gateway(GatewaySettings(port=7001, cors_origins="https://page"))
    assert os.environ["VLLM_PORT"] == "7001"
    assert GatewaySettings().port == 7001
    assert [each.cls.__name__ for each in application().user_middleware] == [
        "CORSMiddleware",
        "head_as_get",
    ]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "chosen",
    [
        {"backend_url": "nowhere"},
        {"client_keys_file": Path("/does/not/exist")},
        {"use_embedded_engine": True},
        {"use_embedded_engine": True, "model": "tiny", "gateway_workers": 2},
    ],
)
def test_nothing_is_served_that_cannot_be_meant(
    chosen: dict[str, Any], served: type[Served]
) -> None:
    with pytest.raises(ValueError, match=r"VLLM_BACKEND_URL|cannot read|VLLM_MODEL"):
        run_gateway(GatewaySettings(**chosen))
    assert served.configs == []


def test_a_gateway_that_did_not_start_has_failed(served: type[Served]) -> None:
    served.starts = False
    with pytest.raises(SystemExit) as caught:
        run_gateway(GatewaySettings())
    assert caught.value.code == 3


def test_a_gateway_that_lost_the_engine_in_its_process_has_failed(served: type[Served]) -> None:
    plain, embedded = GatewaySettings(), GatewaySettings(use_embedded_engine=True, model="tiny")
    run_gateway(embedded)
    served.has_backend = False
    run_gateway(plain)
    with pytest.raises(SystemExit) as caught:
        run_gateway(embedded)
    assert caught.value.code == 3


@pytest.mark.parametrize(
    ("limits", "raised"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, 10**6), [(65_536, 10**6)]),
        ((1024, resource.RLIM_INFINITY), [(65_536, resource.RLIM_INFINITY)]),
        ((65_536, 10**6), []),
        ((4096, 4096), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_as_many_files_are_opened_as_the_system_grants(
    limits: tuple[int, int], raised: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _which, new: seen.append(new))
    gateway._allow_open_files()
    assert seen == raised


def test_a_signal_that_ended_the_server_is_not_raised_again() -> None:
    raised: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: raised.append(number))
    try:
        server = gateway._Server(uvicorn.Config("nowhere:app"))
        with server.capture_signals():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert server.should_exit
    assert raised == []
