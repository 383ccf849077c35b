"""Backends with TLS: an operator's own certificate, and an untrusted one."""

import datetime
import ipaddress
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.scripted import END, OK, SSE_HEAD, answers, backends, event, sends
from gateway.serving import KINDS_OF_LOOP, once, order, plan_for, post, serving, wire

pytestmark = pytest.mark.anyio
LOOPS = pytest.mark.parametrize("loop", KINDS_OF_LOOP)
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a key and its self-signed certificate for 127.0.0.1."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "backend")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "backend.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@LOOPS
async def test_the_gateway_relays_to_a_backend_with_a_trusted_certificate(
    loop: str, tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    stream = [event(f"part {number} " + "x" * 20_000) for number in range(40)]
    body = order(note="y" * 200_000)
    async with (
        backends(answers, sends(SSE_HEAD, *stream, END), tls=tls) as made,
        serving(plan_for(made[0]), loop) as plain,
        serving(plan_for(made[1]), loop) as streaming,
    ):
        async with wire(plain.port) as client:
            for _ in range(3):
                got = await client.ask(post(body))
                assert (got.status, got.complete) == (200, True)
                assert OK.endswith(got.raw)
        assert [call.body for call in made[0].calls] == [body] * 3
        # One connection serves all requests.
        assert [call.number for call in made[0].calls] == [0, 1, 2]
        got = await once(streaming.port, post(order(stream=True)))
        assert got.raw == b"".join(stream) + END
        (backend,) = plain.gateway.pool.backends
        assert backend.healthy
        assert backend.models is not None


async def test_the_gateway_refuses_an_untrusted_certificate(tls: ssl.SSLContext) -> None:
    async with backends(answers, tls=tls) as (backend,), serving(plan_for(backend)) as server:
        got = await once(server.port, post())
        assert (got.status, got.code) == (502, "backend_unreachable")
        assert b"CERTIFICATE_VERIFY_FAILED" in got.raw
        assert backend.calls == []
